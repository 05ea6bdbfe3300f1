"""Replays of a log of allocations on an allocator of one's choice (docs/annex.md)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._tools.allocation_logs import ALLOCATE, FAILURE, AllocationLog
from torch_uvm._tools.iterations import Iterations
from torch_uvm._util.arguments import accelerator
from torch_uvm._util.runtime import check_runtime

_ALLOCATE, _FREE, _BEGINS, _ENDS = range(4)  # as in the C++ replay
_BYTES = ("reserved", "peak_reserved", "runtime_allocations", "runtime_frees")  # of the first pass


@dataclass(frozen=True)
class Replay:
    """The results. Live bytes are the requested ones, reserved bytes those taken from the runtime."""

    allocator: str
    calls: int  #: of allocate and free
    last_iteration_calls: int
    live: list[int]  #: after each row
    reserved: list[int]
    peak_reserved: int
    runtime_allocations: int  #: until the log's end
    runtime_frees: int
    seconds: list[float]  #: in the allocator, of each repetition
    last_iteration_seconds: list[float]  #: of these, those of the last iteration
    failure: str  #: why it gave up; empty if it did not
    failed_at: int  #: row, from 0

    @property
    def peak_live(self) -> int:
        return max(self.live, default=0)

    @property
    def ns_per_call(self) -> float:
        """The median; NaN if the first repetition failed."""
        return _ns_per_call(self.seconds, self.calls)

    @property
    def last_iteration_ns_per_call(self) -> float:
        """The cost once the allocator knows the loop, including the end of the iteration (a reset)."""
        return _ns_per_call(self.last_iteration_seconds, self.last_iteration_calls)

    @property
    def mean_waste(self) -> float:
        """(reserved - live) / live, of their means over the rows."""
        return sum(self.reserved) / sum(self.live) - 1 if any(self.live) else 0.0

    @property
    def waste_at_peak(self) -> float:
        """The same ratio of the two peaks."""
        return self.peak_reserved / self.peak_live - 1 if self.peak_live else 0.0


def _ns_per_call(seconds: list[float], calls: int) -> float:
    return statistics.median(seconds) * 1e9 / max(calls, 1) if seconds else math.nan


def replay(
    log: AllocationLog,
    allocator: str,
    iterations: Iterations,
    *,
    repeat: int = 5,
    progress: Callable[[int, int], object] | None = None,
) -> Replay:
    """Replays a log on one thread, in the log's order, on as many streams as it names.

    Args:
        log: from `read_log`. Failed allocations are left out; what is never freed is freed at the end.
        allocator: one of `allocators()`.
        iterations: the loop's boundaries, which arenas and plans are told.
        repeat: how often to measure, each time on a fresh allocator; one more replay before records bytes.
        progress: called with the replays done and their total.

    Raises:
        ValueError: there is no such allocator; the log has allocations of a device that is not here.
        RuntimeError: there is no device to manage memory for, or the runtime failed.
    """
    here = accelerator()
    check_runtime("replay()", now=True)
    streams = list(dict.fromkeys(event.stream for event in log))
    bytes_of = Counter({-1: 0})
    for event in log:
        bytes_of[event.device] += event.bytes if event.action == ALLOCATE else 0
    busiest = max(bytes_of, key=lambda device: bytes_of[device])
    home = torch.device("cpu") if busiest < 0 or here is None else torch.device(here.type, busiest)
    events = _events(log, iterations, streams)
    passes: list[dict[str, Any]] = []
    for turn in range(repeat + 1):
        passes.append(_C.replay(allocator, events, streams, home, log.peak_live_bytes(), turn == 0))
        if progress is not None:
            progress(turn + 1, repeat + 1)
        if passes[-1]["failure"]:
            break
    timed = [it for it in passes[1:] if not it["failure"]]
    calls = [event.action != FAILURE for event in log]
    begin, end = iterations.spans()[-1] if iterations.count else (0, 0)
    return Replay(
        allocator=allocator,
        calls=sum(calls),
        last_iteration_calls=sum(calls[begin:end]),
        live=list(compress(log.live_bytes(), calls)),
        seconds=[it["seconds"] for it in timed],
        last_iteration_seconds=[it["last_iteration_seconds"] for it in timed],
        **{name: passes[0][name] for name in _BYTES},
        **{name: passes[-1][name] for name in ("failure", "failed_at")},
    )


def allocators() -> list[str]:
    """The names of the allocators that a log can be replayed on."""
    return _C.replay_allocators()


def _events(
    log: AllocationLog, iterations: Iterations, streams: list[int]
) -> list[tuple[int, int, int, int]]:
    """The log's events without failures, with marks where iterations begin and end."""
    begins, ends = ({span[side] for span in iterations.spans()} for side in (0, 1))
    index = {stream: number for number, stream in enumerate(streams)}
    events = []
    for at in range(len(log) + 1):
        if at in ends:
            events.append((_ENDS, 0, 0, 0))
        if at in begins:
            events.append((_BEGINS, 0, 0, 0))
        if at < len(log) and log[at].action != FAILURE:
            kind = _ALLOCATE if log[at].action == ALLOCATE else _FREE
            events.append((kind, index[log[at].stream], log[at].allocation, log[at].bytes))
    return events
