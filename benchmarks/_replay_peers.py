"""Logs of allocations as the module of bench_replay_peers.py takes them, and the table that it prints."""

from __future__ import annotations

import statistics
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if "torch_uvm" not in sys.modules:
    # Only the log readers: importing the package would load a second runtime and require a built extension.
    package = types.ModuleType("torch_uvm")
    package.__path__ = [str(ROOT / "torch_uvm")]
    sys.modules["torch_uvm"] = package
from torch_uvm.allocation_iterations import find  # noqa: E402
from torch_uvm.allocation_logs import AllocationLog  # noqa: E402

MIB = 1 << 20
_BEGINS, _ENDS = 2, 3  # the values in csrc/allocator/replay/replay.h; allocate and free come first
_KINDS = {"allocate": 0, "free": 1}  # a failed allocation is left out
_HEADS = ("allocator", "ns/call", "in the last", "reserved", "at peak", "allocs", "frees")


def columns_of(log: AllocationLog) -> tuple[tuple[list[int], list[int], list[int], int], str]:
    """Returns kinds, allocation numbers, bytes and the number of allocations, and how iterations were found.
    The first three are columns; iteration marks are rows of them.

    Raises:
        ValueError: the log uses a stream other than the default stream of device 0.
    """
    streams = {event.stream for event in log}
    if streams != {0}:
        raise ValueError(f"allocations on streams {sorted(streams)}; accepted: device 0's default one")
    iterations = find(log)
    begins = {begin for begin, _ in iterations.spans()}
    ends = {end for _, end in iterations.spans()}
    rows: list[tuple[int, int, int]] = []
    for at in range(len(log) + 1):
        if at in ends:
            rows.append((_ENDS, 0, 0))
        if at in begins:
            rows.append((_BEGINS, 0, 0))
        if at < len(log) and log[at].action in _KINDS:
            rows.append((_KINDS[log[at].action], log[at].allocation, log[at].bytes))
    kinds, allocations, sizes = ([row[column] for row in rows] for column in range(3))
    return (kinds, allocations, sizes, log.allocation_count), iterations.how


@dataclass
class Column:
    """One allocator on one log. Each replay of the log has one time.

    ``bytes``: the initial size that it is given; None: it chooses.
    """

    name: str  # in cpp/replay_peers.cpp
    bytes: int | None = None
    calls: int = 0  # allocations and frees
    last_iteration_calls: int = 0
    peak_live: int = 0
    peak_reserved: int = 0
    runtime_allocations: int = 0
    runtime_frees: int = 0
    failure: str = ""
    seconds: list[float] = field(default_factory=list)
    last_iteration_seconds: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The column as JSON, with the medians of its times."""
        each = {key: value for key, value in vars(self).items() if "seconds" not in key and key != "name"}
        if self.failure:
            return each
        return each | {
            "ns_per_call": self.ns_per_call,
            "last_iteration_ns_per_call": self.last_iteration_ns_per_call,
        }

    @property
    def ns_per_call(self) -> float:
        """The median over all replays of the log."""
        return statistics.median(self.seconds) * 1e9 / self.calls

    @property
    def last_iteration_ns_per_call(self) -> float:
        """The median time per call of the last iteration, when the allocator knows the loop. Includes the
        end of the iteration."""
        return statistics.median(self.last_iteration_seconds) * 1e9 / self.last_iteration_calls


def table(columns: Sequence[Column], not_run: Mapping[str, str]) -> list[str]:
    """One line per column. A column that was not run states the reason."""
    rows: list[tuple[str, ...]] = [_HEADS]
    rows += [
        (
            it.name,
            f"{it.ns_per_call:.0f}",
            f"{it.last_iteration_ns_per_call:.0f}",
            f"{it.peak_reserved / MIB:.2f} MiB",
            f"{100 * (it.peak_reserved / it.peak_live - 1):.1f} %",
            str(it.runtime_allocations),
            str(it.runtime_frees),
        )
        for it in columns
        if not it.failure
    ]
    lines = [f"{row[0]:16}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in rows]
    lines += [f"{it.name:16}  failed: {it.failure.splitlines()[0]}" for it in columns if it.failure]
    return [*lines, *(f"{name:16}  not run: {why}" for name, why in not_run.items())]
