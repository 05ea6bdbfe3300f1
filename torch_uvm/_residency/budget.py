"""The budget: how much of a device's memory managed tensors may have, and what was done to keep to it."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._patches import install
from torch_uvm._util.arguments import (
    BYTE_FORMS,
    Device,
    accepted_devices,
    byte_count,
    exact_keywords,
    resolve_device,
    show,
)
from torch_uvm._util.log import log
from torch_uvm._util.runtime import check_runtime

ALSO = """, '80%' of the device's memory, "auto" or None"""


#: A budget of fewer bytes is taken for a unit forgotten.
_LEAST_BYTES = 1 << 20


def budget_text(budget: object, what: str = "budget") -> str:
    """A budget as the option table has it. Warns of one below 1 MiB.

    Raises:
        TypeError: `budget` is neither an int, nor a string, nor None (a bool, a float).
        ValueError: it does not parse, is 0 or less, or more than 64 bits or 100 % hold.
    """
    if budget is None:
        return "none"
    if not isinstance(budget, str):
        if isinstance(budget, float) and 0 < budget <= 1:
            raise TypeError(
                f"{what} is {show(budget)}; did you mean '{100 * budget:g}%'? accepted: {BYTE_FORMS}{ALSO}"
            )
        count = byte_count(budget, what, also=ALSO)
        if count == 0:
            raise ValueError(f"{what} is 0, which leaves nothing to work with; accepted: {BYTE_FORMS}{ALSO}")
        warn_of_few_bytes(str(count), what)
        return str(count)
    try:
        text = _C.parse_budget(budget)
    except ValueError as error:
        raise ValueError(f"{what}={budget!r}: {error}; accepted: {BYTE_FORMS}{ALSO}") from None
    if text == "none":
        raise ValueError(f"{what}={budget!r}; accepted: {BYTE_FORMS}{ALSO}")
    warn_of_few_bytes(text, what)
    return text


def warn_of_few_bytes(text: str, what: str) -> None:
    """Warns of a budget, as the option table has it, that is a count of bytes below 1 MiB."""
    if text in ("none", "auto") or text.endswith("%") or _C.parse_bytes(text) >= _LEAST_BYTES:
        return
    meant = (
        f"; did you mean {text}GiB?" if text.isdigit() and int(text) < 1024 else "; a GPU's is such as 20GiB"
    )
    warnings.warn(f"{what} {text} is {_C.format_bytes(_C.parse_bytes(text))}{meant}", stacklevel=2)


def warn_if_cut() -> None:
    """Warns of budgets in force that are less than what was asked for.

    Where a budget is not in force yet, the first allocation on its device warns.
    """
    here = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count() if here is not None and _C.in_use() else 0):
        if (less := _C.budget_was_cut(index)) is not None:
            warnings.warn(less, stacklevel=2)


def request(text: str, device: int | None = None) -> None:
    """Has budgets made of `text`; None: of every device."""
    if text != "none":
        install.for_budgets()
    _C.flush_all_pending()  # while there is the budget that they were deferred under
    _C.request_budget(device, text)
    warn_if_cut()
    if text != "none" and any(_C.residency_stats()["device_bytes"].values()):
        _C.make_known(_managed_tensors())


def _managed_tensors() -> list[torch.Tensor]:
    """Those that Python has: the engine sees what operators use, and what nobody uses it would not know."""
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return [tensor for tensor in tensors if _C.is_managed(tensor)]


def request_default() -> None:
    """Budgets as `enable` has them where nobody has asked for any."""
    install.for_budgets()
    _C.request_default_budget()


@exact_keywords
def set_budget(budget: int | str | None, device: Device | None = None) -> None:
    """Bounds the device-resident bytes of managed tensors: beyond it they are kept on the host.

    May be called at any time. On a device that has no managed memory yet it is in force from its first
    managed allocation on. The option `budget` of TORCH_UVM_CONF and `enable(budget=...)` set the same
    figure; the last word counts, and `enable` without `budget` is none. Where there is more on a device
    already, it is kept to after some operators, when none runs any more that began before.

    Args:
        budget: bytes; a string such as "20GiB" (units as `set_limit` has them) or "80%" of all the
            memory that the device has; never more than that. "auto": what the device has free at that
            time, less a reserve for other libraries (a twentieth of its memory and at least 512 MiB, of
            a device with less than 8 GiB a sixteenth); it is exceeded where nothing can be given up, and
            costs nothing until memory runs short. None: no budget; residency is the driver's.
        device: a torch.device, a string, or the accelerator's index. None: all devices, in place of
            what single ones were given.

    Warns:
        UserWarning: the device has less memory than the budget, so that less is in force (`get_budget`);
            or the budget is below 1 MiB, as if its unit were missing.

    Raises:
        TypeError: `budget` or `device` is of another type.
        ValueError: a budget that does not parse, or of 0 bytes; an unknown device, or the CPU.
        RuntimeError: there is no runtime for this machine's accelerator.

    Whatever is raised, budgets are what they were.

    >>> torch_uvm.set_budget("20GiB")
    >>> torch_uvm.set_budget("80%", device=0)
    """
    text = budget_text(budget)
    index: int | None = None
    if device is not None:
        meant = resolve_device(device)
        if meant.type == "cpu":
            raise ValueError(f"device is {show(device)}: the host has no budget; accepted: {_devices()}")
        index = meant.index
    check_runtime("set_budget()")
    request(text, index)
    log.info("budget of %s: %s", "every device" if index is None else f"device {index}", text)


@exact_keywords
def get_budget(device: Device | None = None) -> int | None:
    """The budget of a device, in bytes.

    Before the first managed allocation on the device it is the budget that the device would have now; the
    call initialises the accelerator then.

    Args:
        device: a torch.device, a string, or the accelerator's index. None: the current device.

    Returns:
        bytes, or None where the device has no budget.

    Raises:
        TypeError: `device` is of another type.
        ValueError: an unknown device, or the CPU.
        RuntimeError: there is no runtime for this machine's accelerator.

    >>> torch_uvm.set_budget("20MiB")
    >>> torch_uvm.get_budget()
    20971520
    """
    check_runtime("get_budget()", now=True)
    here = torch.accelerator.current_accelerator()
    meant = resolve_device(here.type if device is None and here is not None else device)
    if meant.type == "cpu":
        raise ValueError(f"device is {show(device)}: the host has no budget; accepted: {_devices()}")
    return _C.budget_of(meant.index)


def _devices() -> str:
    return accepted_devices().replace("'cpu', ", "")


@exact_keywords
def residency_stats() -> dict[str, Any]:
    """What the residency engine did since the start, or since `reset_residency_stats`.

    Returns:
        `fetched` (host to device), `written_back` (device to host), `dropped_clean` (device copies given
        up with nothing to copy), `used_in_place` (operands that an operator used on the host) and
        `waited` (the host waited for a copy): for each a dictionary of `count`, `bytes` and `ms`
        (milliseconds; on the emulated accelerator modelled ones).
        `plan_hits`, `plan_misses`: operators that came as planned, and that did not.
        `over_budget`: operators whose operands alone exceeded the budget.
        `device_bytes`, `peak_device_bytes`: managed bytes reserved on each device now, and at most since
        `reset_peak_memory_stats`; by torch.device.
        `host_bytes`: pinned bytes reserved for host copies. `records`: storages that are watched.
        `failures`: calls of the runtime that failed inside the engine; results are right all the same.
        All are 0 or empty where there never was a budget.

    >>> torch_uvm.residency_stats()["plan_misses"]
    0
    """
    stats = dict(_C.residency_stats())
    here = torch.accelerator.current_accelerator()
    for key in ("device_bytes", "peak_device_bytes"):
        if here is not None:
            stats[key] = {torch.device(here.type, index): count for index, count in stats[key].items()}
    return stats


@exact_keywords
def reset_residency_stats() -> None:
    """Sets counts, bytes and times to 0. Peaks are the memory statistics': `reset_peak_memory_stats`."""
    _C.reset_residency_stats()
