"""The emulated accelerator: its set-up, and what its model of a driver counted.

All numbers here are *modelled*: page residency, faults and evictions as a driver would perform them, and a
clock that advances by the costs of a measured profile. They describe memory traffic, not arithmetic.
Accesses by host code outside PyTorch are not seen and not counted.

>>> import torch, torch_uvm
>>> torch_uvm.emulated.configure(memory="64MiB")      # before the first use of the device
>>> torch_uvm.enable()
>>> x = torch.ones(32 * 1024**2, device="emu")        # 128 MiB
>>> torch_uvm.emulated.counters()["evicted_pages"] > 0
True
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import byte_count, exact_keywords, resolve_device, show, whole_number

__all__ = [
    "ResidencySample",
    "configure",
    "counters",
    "max_resident_bytes",
    "profiles",
    "reset_counters",
    "residency",
    "resident_bytes",
    "time_us",
    "timeline",
]

#: The largest `configure(devices=...)`, and the smallest `configure(memory=...)` in bytes.
MAX_DEVICES = 64
MIN_MEMORY = 1024**2


class ResidencySample(NamedTuple):
    """One point of `timeline`."""

    time_us: float  #: modelled microseconds since the device was first used
    resident_bytes: int  #: managed bytes resident on the device
    plain_bytes: int  #: plain (not managed) memory allocated on the device
    managed_bytes: int  #: managed bytes allocated in total, wherever they are


def _index(device: torch.device | str | int) -> int:
    meant = resolve_device(device)
    if meant.type == "cpu":
        raise ValueError(f"device is {show(device)}; accepted: an emulated device")
    return meant.index


@exact_keywords
def profiles() -> list[str]:
    """The names of the cost profiles for `configure`."""
    return _C.emu_profiles()


@exact_keywords
def configure(
    devices: int = 1,
    memory: int | str = "256MiB",
    profile: str = "h200",
    *,
    seed: int | None = None,
) -> None:
    """Configures the emulated accelerator, before its first use.

    It sets all four properties: an argument left out has the default shown here, not the value in
    TORCH_UVM_CONF.

    Args:
        devices: the number of devices, 1 to 64.
        memory: of each device, in bytes or as a string such as "256MiB"; at least 1 MiB.
        profile: the costs of the modelled clock, one of `profiles()`.
        seed: delays queued copies and prefetches at random (seeded by it) until something waits for them, so
            that a missing synchronisation shows. None: they run in order, at once.

    Raises:
        TypeError, ValueError: a value that is not accepted. Nothing has changed.
        RuntimeError: the accelerator was already used, or is not registered in this process.
    """
    count = whole_number(devices, "devices", 1, MAX_DEVICES)
    capacity = byte_count(memory, "memory")
    if capacity < MIN_MEMORY:
        raise ValueError(f"memory is {show(memory)}; accepted: at least {MIN_MEMORY} bytes (1 MiB)")
    if not isinstance(profile, str):
        raise TypeError(f"profile is {show(profile)}; accepted: {', '.join(profiles())}")
    if profile not in profiles():
        raise ValueError(f"profile is {profile!r}; accepted: {', '.join(profiles())}")
    number = None if seed is None else whole_number(seed, "seed", 0, 2**64 - 1)
    _C.emu_configure(count, capacity, profile, number)


@exact_keywords
def counters(device: torch.device | str | int | None = None) -> dict[str, int]:
    """The counters of the emulated driver since the start or the last `reset_counters`; modelled.

    Pages (of 64 KiB): faults_on_device, faults_on_host, evicted_pages, dropped_pages. Bytes: bytes_to_device
    and bytes_to_host (migrated, prefetched, evicted), bytes_copied_to_device and bytes_copied_to_host
    (asynchronous copies), bytes_in_place (accessed across the link). Calls: kernels, prefetch_calls,
    advise_calls, discard_calls, zero_calls, copy_calls, allocate_calls, free_calls, event_records,
    synchronisations.

    Args:
        device: an emulated device or its index; None for the sum over all devices and the host.

    Raises:
        TypeError, ValueError: another device.
    """
    return _C.emu_counters(None if device is None else _index(device))


@exact_keywords
def reset_counters() -> None:
    """Resets the counters of all devices to 0, clears the timelines and starts new peaks."""
    _C.emu_reset_counters()


@exact_keywords
def resident_bytes(device: torch.device | str | int = 0) -> int:
    """Managed bytes resident on an emulated device now; modelled. Errors as those of `counters`."""
    return _C.emu_resident_bytes(_index(device))


@exact_keywords
def max_resident_bytes(device: torch.device | str | int = 0) -> int:
    """The most of them since the last `reset_counters`; modelled. Errors as those of `counters`."""
    return _C.emu_peak_resident_bytes(_index(device))


@exact_keywords
def time_us() -> float:
    """The latest of the modelled clocks, of the host and of every stream, in microseconds."""
    return _C.emu_time_us()


@exact_keywords
def timeline(device: torch.device | str | int = 0) -> list[ResidencySample]:
    """Residency of an emulated device over modelled time, oldest first; a few thousand points at most.

    Errors as those of `counters`.
    """
    return [ResidencySample(*point) for point in _C.emu_timeline(_index(device))]


@exact_keywords
def residency(t: torch.Tensor) -> dict[torch.device, int]:
    """Where the bytes of a managed tensor are now; modelled.

    Args:
        t: a managed tensor of any shape.

    Returns:
        bytes by device, "cpu" for the host; devices without bytes of it are left out. A page with a
        duplicate counts in each place, a page never touched in none.

    Raises:
        TypeError: `t` is not a tensor.
        ValueError: `t` is not managed.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"residency() takes a torch.Tensor; received {show(t)}")
    if not _C.is_managed(t):
        raise ValueError(
            f"residency() of a tensor on {t.device} that is not managed; accepted: managed tensors"
        )
    found = _C.emu_residency(t)
    places = {torch.device("cpu"): int(found["host"])}
    for index, count in enumerate(found["devices"]):
        places[torch.device("emu", index)] = int(count)
    return {place: count for place, count in places.items() if count}
