"""The least bytes that must cross the link, from a trace of accesses and a budget.

    python benchmarks/lower_bound.py TRACE --budget 4GiB [--forward-ms 40 --backward-ms 80] [--json FILE]

It shares no code with torch_uvm, so that the two can be compared. It reads the trace itself (docs/traces.md)
and ignores the recorded transfers: only uses, creations and frees count.

Meaning of the bound: the device has room for the budget, with no reserve and no fragmentation. When room is
short, the bytes with the farthest next use are evicted (Belady's MIN), byte by byte, so a storage may be
partly resident. Every schedule makes each operand resident at its operator, or uses it in place where the
trace allows that. None fetches fewer bytes: MIN is optimal for fetches of equal cost, and moving whole
storages only costs more. The bytes written back are those of this schedule: evicted bytes that the host does
not have. A schedule that fetches more could write back less.

A use in place crosses the link once, and back if it writes. An operator that may use operands in place does
so for those that are absent, unless a resident one has a later next use; the bytes in are the same either
way. They are counted separately, because they have another rate and overlap only with their own operator.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINK = 52e9  # bytes a second each way, as measured on an H200
IN_PLACE = 41e9  # the same for a kernel that reads and writes across the link
NEVER = sys.maxsize
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass
class Step:
    """Bytes of one step, in each direction."""

    fetched: int = 0
    written_back: int = 0
    in_place_read: int = 0
    in_place_written: int = 0
    over: int = 0  #: operators whose operands, outputs included, exceed the budget on their own


@dataclass
class _Operator:
    reads: list[int]
    writes: list[int]
    in_place_ok: bool
    step: int
    births: list[int] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)


@dataclass
class _Storage:
    bytes: int
    device: int
    here: int = 0  #: resident bytes
    clean: int = 0  #: resident bytes that the host has too
    next: int = NEVER  #: the next operator that uses it


def read(path: Path, device: int = 0) -> tuple[list[_Operator], dict[int, _Storage], int]:
    """Operators that use storages of ``device``, the storages, and how many steps are complete.

    Raises:
        ValueError: the file is no trace of version 1 or 2.
    """
    operators: list[_Operator] = [_Operator([], [], True, 0)]
    storages: dict[int, _Storage] = {}
    steps = 0
    begun = len(operators)  # operators before the current step
    with path.open() as file:
        header = json.loads(next(file, "null"))
        if not isinstance(header, dict) or header.get("format") != "torch_uvm accesses":
            raise ValueError(f"{path}: no trace of accesses")
        if header.get("version") not in (1, 2):
            raise ValueError(f"{path}: version {header.get('version')}; 1 and 2 are read")
        for line in file:
            it = json.loads(line)
            if "operator" in it:
                operators.append(_Operator(it["reads"], it["writes"], it["in_place_ok"], steps))
            elif "birth" in it:
                storages[it["birth"]] = _Storage(it["bytes"], it["device"])
                operators[-1].births.append(it["birth"])
            elif "storage" in it and "transfer" not in it:
                if it["storage"] not in storages:
                    there = it["bytes"] if it["resident"] and len(operators) == 1 else 0
                    storages[it["storage"]] = _Storage(it["bytes"], it["device"], there)
                    if it["resident"] and not there:
                        # The trace does not contain its creation; it did not exist at the beginning.
                        operators.append(_Operator([], [], True, steps, births=[it["storage"]]))
            elif "death" in it:
                operators[-1].deaths.append(it["death"])
            elif "step" in it and len(operators) > begun:  # of two consecutive marks the second ends no step
                steps += 1
                begun = len(operators)
    ours = {name: it for name, it in storages.items() if it.device == device}
    for op in operators:
        for names in (op.reads, op.writes, op.births, op.deaths):
            names[:] = [name for name in names if name in ours]
    return operators, ours, steps


def least(operators: Sequence[_Operator], storages: dict[int, _Storage], budget: int) -> list[Step]:
    """The bytes that cross the link in each step, evicting the farthest next use. Modifies the storages."""
    return _Device(operators, storages, budget).run()


class _Device:
    def __init__(self, operators: Sequence[_Operator], storages: dict[int, _Storage], budget: int) -> None:
        self.operators = operators
        self.storages = storages
        self.budget = budget
        self.steps = [Step() for _ in range(operators[-1].step + 1)]
        self.used = 0
        #: (-next use, storage), farthest first; outdated entries are skipped
        self.farthest: list[tuple[int, int]] = []

    def run(self) -> list[Step]:
        uses: dict[int, list[int]] = {}
        for at, op in enumerate(self.operators):
            for name in {*op.reads, *op.writes}:
                uses.setdefault(name, []).append(at)
        for positions in uses.values():
            positions.reverse()
        for name, it in self.storages.items():
            it.next = uses[name][-1] if name in uses else NEVER
            there, it.here = it.here, 0
            self._arrive(name, there, clean=False)
        self._make_room(0, set(), self.steps[0])
        for op in self.operators:
            operands = sorted({*op.reads, *op.writes})
            for name in operands:
                uses[name].pop()
                self.storages[name].next = uses[name][-1] if uses[name] else NEVER
            self._run(op, operands, {*operands, *op.births})
            for name in op.births:
                self.storages[name].next = uses[name][-1] if uses.get(name) else NEVER
            for name in {*operands, *op.births}:
                heapq.heappush(self.farthest, (-self.storages[name].next, name))
            for name in op.deaths:
                self.used -= self.storages[name].here
                self.storages[name].here = self.storages[name].clean = 0
        return self.steps

    def _run(self, op: _Operator, operands: Iterable[int], running: set[int]) -> None:
        step = self.steps[op.step]
        written = set(op.writes)
        need = sum(self.storages[name].bytes for name in running) if not op.in_place_ok else 0
        if need > self.budget:
            step.over += 1
        born = sum(self.storages[name].bytes for name in op.births)
        if not op.in_place_ok:
            missing = sum(self.storages[name].bytes - self.storages[name].here for name in operands)
            self._make_room(missing + born, running, step)
            for name in operands:
                absent = self.storages[name].bytes - self.storages[name].here
                step.fetched += absent
                self._arrive(name, absent, clean=True)
        else:
            self._make_room(born, running, step)
            for name in sorted(operands, key=lambda name: self.storages[name].next):
                self._use(name, name in written, running, step)
        for name in written:
            self.storages[name].clean = 0
        for name in op.births:
            self._arrive(name, self.storages[name].bytes, clean=False)

    def _use(self, name: int, written: bool, running: set[int], step: Step) -> None:
        """Fetches absent bytes if there is room, or if bytes with a later next use can be evicted; else uses
        them in place."""
        it = self.storages[name]
        absent = it.bytes - it.here
        if it.next != NEVER:
            self._make_room(absent, running, step, later_than=it.next)
            coming = min(absent, max(0, self.budget - self.used))
            step.fetched += coming
            self._arrive(name, coming, clean=True)
            absent -= coming
        step.in_place_read += absent
        step.in_place_written += absent if written else 0

    def _arrive(self, name: int, count: int, *, clean: bool) -> None:
        it = self.storages[name]
        self.used += count
        it.here += count
        it.clean += count if clean else 0
        heapq.heappush(self.farthest, (-it.next, name))

    def _make_room(self, count: int, running: set[int], step: Step, later_than: int = -1) -> None:
        aside = []
        while self.used + count > self.budget and self.farthest:
            key, name = heapq.heappop(self.farthest)
            it = self.storages[name]
            if -key != it.next or it.here == 0:
                continue
            if -key <= later_than:
                aside.append((key, name))
                break
            if name in running:
                aside.append((key, name))
                continue
            gone = min(it.here, self.used + count - self.budget)
            step.written_back += max(0, gone - it.clean)
            it.clean = max(0, it.clean - gone)
            it.here -= gone
            self.used -= gone
            if it.here:
                aside.append((key, name))
        for entry in aside:
            heapq.heappush(self.farthest, entry)


def bound(path: Path, budget: int, device: int = 0) -> dict[str, Any]:
    """The least bytes of a step: the mean over steps with a step before and after, or over the whole trace.

    Returns:
        ``fetched``, ``written_back``, ``in_place_read``, ``in_place_written``: bytes per step. ``over``:
        operators per step that exceed the budget on their own. ``steps``: number of averaged steps; 0: the
        trace has fewer than three complete steps, and the figures cover all of it, including the cold start.

    Raises:
        ValueError: the file is no trace of version 1. OSError: it cannot be read.
    """
    operators, storages, complete = read(path, device)
    each = least(operators, storages, budget)
    middle = each[1 : complete - 1]
    keys = ("fetched", "written_back", "in_place_read", "in_place_written", "over")
    chosen = middle or each
    divisor = len(middle) or 1
    return {
        **{key: sum(getattr(step, key) for step in chosen) / divisor for key in keys},
        "steps": len(middle),
    }


def phase_floor(least_bytes: dict[str, Any], forward_ms: float, backward_ms: float) -> float:
    """Milliseconds: write-backs overlap forward, fetches overlap backward, and nothing overlaps the
    optimizer.

    forward_ms, backward_ms: in core; backward includes recomputation
    """
    out = float(least_bytes["written_back"]) / LINK * 1e3
    into = float(least_bytes["fetched"]) / LINK * 1e3
    in_place = float(max(least_bytes["in_place_read"], least_bytes["in_place_written"])) / IN_PLACE * 1e3
    return max(forward_ms, out) + max(backward_ms, into) + in_place


def _bytes(text: str) -> int:
    for unit, size in reversed(_UNITS.items()):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * size)
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="The least bytes that must cross the link.", allow_abbrev=False
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budget", type=_bytes, required=True, help="such as 4GiB")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--forward-ms", type=float, help="in core")
    parser.add_argument("--backward-ms", type=float, help="in core, recomputation included")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if (arguments.forward_ms is None) != (arguments.backward_ms is None):
        parser.error("--forward-ms and --backward-ms go together")
    try:
        result = bound(arguments.trace, arguments.budget, arguments.device)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{arguments.trace}: {error}")
    if arguments.forward_ms is not None:
        result["floor_ms"] = phase_floor(result, arguments.forward_ms, arguments.backward_ms)
    for key, value in result.items():
        print(f"{key:<18}{value:,.0f}" if key != "floor_ms" else f"{key:<18}{value:.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
