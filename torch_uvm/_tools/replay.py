"""Replays of a log of allocations on an allocator of one's choice (docs/annex.md)."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._tools.allocation_logs import AllocationLog
from torch_uvm._tools.iterations import Iterations
from torch_uvm._util.arguments import accelerator, resolve_device

_BEGINS, _ENDS = 2, 3  # numbered as in the C++ replay, after allocate and free


@dataclass(frozen=True)
class Replay:
    """The results. Live bytes are the requested ones, reserved bytes those taken from the runtime."""

    allocator: str
    description: str
    seconds: tuple[float, ...]  #: in the allocator, of each repetition
    last_iteration_seconds: tuple[float, ...]  #: of these, those of the last iteration
    last_iteration_calls: int
    calls: int  #: of allocate and free
    peak_live: int
    peak_reserved: int
    mean_live: float  #: over the rows
    mean_reserved: float
    runtime_allocations: int  #: until the log's end
    runtime_frees: int
    events_recorded: int
    details: dict[str, float]  #: of this allocator alone, at the log's end
    live: array[int]  #: after each row
    reserved: array[int]
    failure: str  #: why it gave up; empty if it did not
    failed_at: int  #: row, from 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def ns_per_call(self) -> float:
        return self.median_seconds * 1e9 / max(self.calls, 1)

    @property
    def last_iteration_ns_per_call(self) -> float:
        """The cost once the allocator knows the loop, including the end of the iteration (a reset)."""
        seconds = statistics.median(self.last_iteration_seconds) if self.seconds else float("nan")
        return seconds * 1e9 / max(self.last_iteration_calls, 1)

    @property
    def mean_waste(self) -> float:
        """(reserved - live) / live, of their means over the rows."""
        return self.mean_reserved / self.mean_live - 1 if self.mean_live else 0.0

    @property
    def waste_at_peak(self) -> float:
        """The same ratio of the two peaks."""
        return self.peak_reserved / self.peak_live - 1 if self.peak_live else 0.0


def ceiling(log: AllocationLog) -> int:
    """The managed memory, in bytes, that a replay of this log may use on this machine.

    Raises:
        RuntimeError: there is no device to manage memory for.
        ValueError: the log needs more than the limit, the host or a device has, or devices that are not
            here.
    """
    here = accelerator()
    if here is None:
        raise RuntimeError("there is no device to manage memory for; TORCH_UVM_DEVICE=emu emulates one")
    _C.start_device(resolve_device(here))
    _C.empty_strided([0], [1], torch.uint8, resolve_device(here))  # creates the runtime
    count = torch.accelerator.device_count()
    bounds: list[int] = []
    devices = 0
    for device in log.devices():
        peak = log.peak_live_bytes(device)
        if device < 0:
            continue
        if device >= count:
            raise ValueError(f"the log has allocations of device {device}; there are {count} devices here")
        total = _C.device_properties(device)["total_memory"]
        _refuse(peak, total, f"device {device} has {_C.format_bytes(total)}")
        devices += total
    peak = log.peak_live_bytes()
    limit = _C.get_limit()
    if limit is not None:
        left = max(limit - _C.managed_bytes(), 0)
        _refuse(peak, left, f"of the limit, {_C.format_bytes(limit)}, {_C.format_bytes(left)} are left")
        bounds.append(left)
    available = _C.host_memory_available()
    _refuse(peak, available, f"the host has {_C.format_bytes(available)} available")
    bounds.append(available)
    if -1 not in log.devices():
        bounds.append(devices)
    return min(bounds)


def _refuse(peak: int, most: int, why: str) -> None:
    if peak > most:
        raise ValueError(f"the log has up to {_C.format_bytes(peak)} live at once; {why}")


def replay(
    log: AllocationLog,
    allocator: str,
    iterations: Iterations,
    *,
    repeat: int = 5,
    most_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Replay:
    """Replays a log on one thread, in the log's order, on as many streams as it names.

    Args:
        log: from `read_log`. Failed allocations are left out; what is never freed is freed at the end.
        allocator: one of `allocators()`.
        iterations: the loop's boundaries, which arenas and plans are told.
        repeat: how often to measure, each time on a fresh allocator; one more replay before records bytes.
        most_bytes: of managed memory at once; None: `ceiling(log)`.
        progress: called from time to time with the events done and their total.

    Raises:
        ValueError: there is no such allocator; the errors of `ceiling`.
        RuntimeError: the runtime failed.
    """
    if most_bytes is None:
        most_bytes = ceiling(log)
    kinds, numbers, sizes, streams = _columns(log, iterations)
    result: dict[str, Any] = _C.replay(
        allocator,
        kinds,
        numbers,
        sizes,
        streams,
        log.logged_streams,
        log.allocation_count,
        most_bytes,
        log.peak_live_bytes(),
        repeat,
        progress,
    )
    for name in ("live", "reserved"):
        column = array("Q")
        column.frombytes(result[name])
        result[name] = column
    for name in ("seconds", "last_iteration_seconds"):
        result[name] = tuple(result[name])
    return Replay(allocator=allocator, **result)


def allocators() -> list[str]:
    """The names of the allocators that a log can be replayed on."""
    return _C.replay_allocators()


def _columns(
    log: AllocationLog, iterations: Iterations
) -> tuple[array[int], array[int], array[int], array[int]]:
    """The log's events without failures, with marks where iterations begin and end."""
    kinds, numbers, sizes, streams = array("B"), array("I"), array("Q"), array("I")

    def mark(kind: int) -> None:
        kinds.append(kind)
        numbers.append(0)
        sizes.append(0)
        streams.append(0)

    begins = {begin for begin, _ in iterations.spans()}
    ends = {end for _, end in iterations.spans()}
    for at, kind in enumerate(log.kinds):
        if at in ends:
            mark(_ENDS)
        if at in begins:
            mark(_BEGINS)
        if kind == 2:
            continue
        kinds.append(kind)
        numbers.append(log.allocations[at])
        sizes.append(log.bytes[at])
        streams.append(log.streams[at])
    if len(log) in ends:
        mark(_ENDS)
    return kinds, numbers, sizes, streams
