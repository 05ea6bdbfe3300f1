"""The budget: how much of a device's memory managed tensors may use, and what the engine did for it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._patches import deferred_updates, install
from torch_uvm._util.arguments import (
    BYTE_FORMS,
    Device,
    accelerator,
    accepted_devices,
    byte_count,
    exact_keywords,
    resolve_device,
    show,
)
from torch_uvm._util.log import log
from torch_uvm._util.runtime import check_runtime

ALSO = """, '80%' of the device's memory, "auto" or None ("none")"""


#: A budget below this is taken for one with a forgotten unit.
_LEAST_BYTES = 1 << 20


def budget_text(budget: object) -> str:
    """A budget as the option table stores it. Warns if it is below 1 MiB.

    Raises:
        TypeError: `budget` is neither an int, nor a string, nor None (a bool, a float).
        ValueError: it does not parse, is 0 or less, or exceeds 64 bits or 100 %.
    """
    if budget is None:
        return "none"
    text = budget if isinstance(budget, str) else str(byte_count(budget, "budget", also=ALSO))
    try:
        text = _C.parse_budget(text)
    except ValueError as error:
        raise ValueError(f"budget={budget!r}: {error}; accepted: {BYTE_FORMS}{ALSO}") from None
    warn_of_few_bytes(text, "budget")
    return text


def warn_of_few_bytes(text: str, what: str) -> None:
    """Warns if a budget, as the option table stores it, is a count of bytes below 1 MiB."""
    if text in ("none", "auto") or text.endswith("%") or _C.parse_bytes(text) >= _LEAST_BYTES:
        return
    meant = (
        f"; did you mean {text}GiB?" if text.isdigit() and int(text) < 1024 else "; a GPU's is such as 20GiB"
    )
    warnings.warn(f"{what} {text} is {_C.format_bytes(_C.parse_bytes(text))}{meant}", stacklevel=2)


def warn_of_budgets() -> None:
    """Warns if a budget in force is smaller than the one requested, and once per process if there is none.

    For a budget that is not in force yet, the first allocation on its device warns.
    """
    here = torch.accelerator.current_accelerator()
    for index in range(torch.accelerator.device_count() if here is not None and _C.in_use() else 0):
        if (warning := _C.budget_warning(index)) is not None:
            warnings.warn(warning, stacklevel=2)


def request(text: str, device: int | None = None) -> None:
    """Requests a budget.

    Args:
        text: as the option table stores it.
        device: the index of a device; None for every device.
    """
    if text != "none":
        install.for_budgets()
    _C.flush_all_pending()  # before their budget is replaced
    _C.request_budget(device, text)
    deferred_updates.try_again()
    warn_of_budgets()
    if text != "none" and not _C.knows_all():
        # The engine learns of tensors from operators, so it does not know those that no operator has used.
        _C.make_all_known()


def request_default() -> None:
    """Requests the budget that `enable` gives if there is no other request."""
    install.for_budgets()
    _C.request_default_budget()


@exact_keywords
def set_budget(budget: int | str | None, device: Device | None = None) -> None:
    """Limits the device-resident bytes of managed tensors; the rest is kept on the host.

    It may be called at any time, and takes effect with the device's first managed allocation. If more is
    resident then, the engine evicts the excess, once the operators that it has not watched have finished.

    Args:
        budget: bytes, or a string: "20GiB" (units as in `set_limit`), or "80%" of the device's memory. At
            most what the device has free is in force, and at most the limit, which the budgets of several
            devices share in proportion. A single operator that needs more may exceed it, up to what "auto"
            would be. "auto": what is free on the device, less a reserve; it is never exceeded, and follows
            what other memory on the device needs (docs/how-it-works.md). None or "none": no budget; the
            driver moves pages by faults.
        device: a torch.device, a string, or the accelerator's index. None: all devices, replacing requests
            for single devices.

    Warns:
        UserWarning: less is in force (`get_budget`), as the device has less free or the limit is less; the
            budget is below 1 MiB, as if its unit were missing; or, once per process, there is none.

    Raises:
        TypeError: `budget` or `device` is of another type.
        ValueError: a budget that does not parse, or of 0 bytes; an unknown device, or the CPU.
        RuntimeError: there is no runtime for this machine's accelerator.

    If an error is raised, no budget has changed.

    >>> torch_uvm.set_budget("20GiB")
    >>> torch_uvm.set_budget("80%", device=0)
    """
    text = budget_text(budget)
    index = None if device is None else device_with_a_budget(device)
    check_runtime("set_budget()")
    request(text, index)
    log.info("budget of %s: %s", "every device" if index is None else f"device {index}", text)


@exact_keywords
def get_budget(device: Device | None = None) -> int | None:
    """The budget of a device that is in force, in bytes.

    Before the device's first managed allocation it is the budget that would take effect now; the call then
    initialises the accelerator.

    Args:
        device: as that of `set_budget`, and so are the errors. None: the current device.

    Returns:
        bytes, or None if the device has no budget.

    >>> torch_uvm.set_budget("20MiB")
    >>> torch_uvm.get_budget()
    20971520
    """
    check_runtime("get_budget()", now=True)
    return _C.budget_of(device_with_a_budget(device))


def device_with_a_budget(device: Device | None) -> int:
    """The index of a device; None: of the current one.

    Raises:
        TypeError, ValueError: it is no device of the accelerator.
    """
    meant = resolve_device(accelerator() if device is None else device)
    if meant.type == "cpu":
        accepted = accepted_devices().replace("'cpu', ", "")
        raise ValueError(f"device is {show(device)}: the host has no budget; accepted: {accepted}")
    return meant.index


@exact_keywords
def stats() -> dict[str, Any]:
    """What the residency engine did since the start, or since `reset_residency_stats`.

    Returns:
        a dictionary. `fetched` (host to device), `written_back` (device to host), `dropped_clean` (device
        copies evicted without a copy), `used_in_place` (operands that an operator used on the host) and
        `waited` (the host waited for a copy) are dictionaries of `count`, `bytes` and `ms` (milliseconds,
        modelled ones on the emulated accelerator).
        `plan_hits` and `plan_misses` count operators that came as scheduled, and that did not.
        `over_budget` counts operators that exceeded the budget, results created on the host for want of room
        on the device, and budgets that were set below what had to stay there.
        `device_bytes` and `peak_device_bytes` are managed bytes reserved on each device, now and at most
        since `reset_peak_memory_stats`, by torch.device.
        `host_bytes` is pinned bytes reserved for host copies. `records` counts storages that are tracked.
        `failures` counts runtime calls that failed inside the engine; results are correct all the same.
        All are 0 or empty if there never was a budget.

    >>> torch_uvm.stats()["plan_misses"]
    0
    """
    found = dict(_C.residency_stats())
    here = torch.accelerator.current_accelerator()
    for key in ("device_bytes", "peak_device_bytes"):
        if here is not None:
            found[key] = {torch.device(here.type, index): count for index, count in found[key].items()}
    return found


@exact_keywords
def reset_residency_stats() -> None:
    """Resets counts, bytes and times to 0. `reset_peak_memory_stats` resets the peaks."""
    _C.reset_residency_stats()
