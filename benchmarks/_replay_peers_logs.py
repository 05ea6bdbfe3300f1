"""Converts logs of allocations to the input of the compiled module of bench_replay_peers.py."""

from __future__ import annotations

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if "torch_uvm" not in sys.modules:
    # Only the log readers: importing the package would load a second runtime and require a built extension.
    package = types.ModuleType("torch_uvm")
    package.__path__ = [str(ROOT / "torch_uvm")]
    sys.modules["torch_uvm"] = package
from torch_uvm.allocation_iterations import find  # noqa: E402
from torch_uvm.allocation_logs import AllocationLog  # noqa: E402

_BEGINS, _ENDS = 2, 3  # the values in csrc/allocator/replay/replay.h; allocate and free come first
_KINDS = {"allocate": 0, "free": 1}  # a failed allocation is left out


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
    kinds: list[int] = []
    allocations: list[int] = []
    sizes: list[int] = []

    def add(kind: int, allocation: int = 0, count: int = 0) -> None:
        kinds.append(kind)
        allocations.append(allocation)
        sizes.append(count)

    for at in range(len(log) + 1):
        if at in ends:
            add(_ENDS)
        if at in begins:
            add(_BEGINS)
        if at < len(log) and log[at].action in _KINDS:
            add(_KINDS[log[at].action], log[at].allocation, log[at].bytes)
    return (kinds, allocations, sizes, log.allocation_count), iterations.how
