"""The schedule of one iteration of a loop: what crosses the link, when, and what stays where it is.

`schedule_of` lets the residency engine's policy follow a recorded trace, and returns what it decides.
Operators are numbered from 0. The iteration repeats: operator 0 follows the last one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_uvm import _C
from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.held_traces import device_times
from torch_uvm._tools.operator_times import operator_times
from torch_uvm._util.escaping import excerpt, printable

FORMAT = "torch_uvm schedule"
VERSION = 1
KINDS = ("fetch", "write_back", "drop")

_LONGEST = 64 << 20  # characters; about 400 for each operator


@dataclass(frozen=True)
class Value:
    """The storages that have one role in every iteration: a parameter, or a temporary of each iteration."""

    bytes: int
    is_persistent: bool


@dataclass(frozen=True)
class Use:
    """An operator's use of a value. ``in_place``: of the host's copy. ``creates``: the value begins here."""

    value: int
    writes: bool
    creates: bool
    in_place: bool


@dataclass(frozen=True)
class Operator:
    """``ms``: its duration with all operands on the device. ``frees``: values that end behind it."""

    name: str
    ms: float
    uses: tuple[Use, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """``kind`` is one of `KINDS`; a drop copies nothing, because the host has the same bytes.

    Args:
        after: the operator that triggers it, when it has ended.
        before: the operator that needs it. It uses a fetched value, or needs the room of one that leaves.
        stays: how many operators later the device's copy is given up. It is read until then.
    """

    kind: str
    value: int
    after: int
    before: int
    stays: int = 0


@dataclass(frozen=True)
class Schedule:
    """One iteration within a budget.

    Args:
        budget: bytes of device memory.
        capacity: the part of it for storages. The rest is for staging, and a reserve against fragments.
        steps: of the loop. Two, if storages of a step last until those of the next one have been made.
    """

    budget: int
    capacity: int
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    transfers: tuple[Transfer, ...]
    steps: int = 1

    @property
    def in_core_ms(self) -> float:
        """A step's duration without transfers."""
        return sum(op.ms for op in self.operators) / self.steps

    def bytes_of(self, kind: str) -> int:
        """Bytes of all transfers of this kind."""
        return sum(self.values[it.value].bytes for it in self.transfers if it.kind == kind)

    def bytes_in_place(self) -> int:
        """Bytes of the uses of host copies."""
        uses = (use for op in self.operators for use in op.uses if use.in_place)
        return sum(self.values[use.value].bytes for use in uses)

    def __str__(self) -> str:
        size = _C.format_bytes
        moved = ", ".join(f"{size(self.bytes_of(kind))} {kind.replace('_', ' ')}" for kind in KINDS)
        return (
            f"{len(self.operators)} operators, {self.in_core_ms * self.steps:.2f} ms in core; "
            f"budget {size(self.budget)}, of which {size(self.capacity)} for storages\n"
            f"{len(self.transfers)} transfers: {moved}; {size(self.bytes_in_place())} used in place"
        )

    def lines(self) -> Iterator[str]:
        """A line for each transfer, by trigger."""
        for it in sorted(self.transfers, key=lambda it: (it.after, it.before)):
            trigger, need = self.operators[it.after].name, self.operators[it.before].name
            size = _C.format_bytes(self.values[it.value].bytes)
            stays = f", stays for {it.stays}" if it.stays else ""
            yield f"{it.kind:<10} {size:>10}  after {it.after} {trigger}, before {it.before} {need}{stays}"

    def save(self, path: str | Path) -> None:
        """Writes the schedule as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        record = {"format": FORMAT, "version": VERSION, "units": {"time": "ms", "size": "bytes"}}
        Path(path).write_text(json.dumps(record | asdict(self)) + "\n", encoding="utf-8")


def load_schedule(path: str | Path) -> Schedule:
    """Reads what `Schedule.save` wrote. Reading runs nothing.

    Raises:
        ValueError: it is no schedule, or does not fit the format. OSError: it cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise ValueError(f"{printable(path)}, line 1: longer than {_LONGEST} characters")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{printable(path)}: no schedule: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
        raise ValueError(f"{printable(path)}: this is not a schedule of version {VERSION}")
    try:
        schedule = Schedule(
            _number(record["budget"]),
            _number(record["capacity"]),
            tuple(_operator(it) for it in record["operators"]),
            tuple(Value(_number(it["bytes"]), _flag(it["is_persistent"])) for it in record["values"]),
            tuple(_transfer(it) for it in record["transfers"]),
            _number(record.get("steps", 1)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{printable(path)}: {type(error).__name__}: {error}") from None
    ends = [end for it in schedule.transfers for end in (it.after, it.before, it.stays)]
    named = [it.value for it in schedule.transfers]
    for op in schedule.operators:
        named += [use.value for use in op.uses] + list(op.frees)
    if max(named, default=-1) >= len(schedule.values) or max(ends, default=-1) >= len(schedule.operators):
        raise ValueError(f"{printable(path)}: a value or an operator that the schedule does not have")
    if schedule.budget == 0 or schedule.steps == 0 or schedule.in_core_ms <= 0:
        raise ValueError(f"{printable(path)}: a schedule without budget, or without time")
    return schedule


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{excerpt(value)}; expected a whole number from 0 on")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{excerpt(value)}; expected true or false")
    return value


def _operator(record: Mapping[str, Any]) -> Operator:
    ms = record["ms"]
    if not isinstance(record["name"], str) or not isinstance(ms, int | float) or not 0 <= ms < 1e12:
        raise ValueError(f"an operator {excerpt(record['name'])} of {excerpt(ms)} ms")
    uses = tuple(
        Use(_number(it["value"]), _flag(it["writes"]), _flag(it["creates"]), _flag(it["in_place"]))
        for it in record["uses"]
    )
    return Operator(record["name"], float(ms), uses, tuple(_number(it) for it in record["frees"]))


def _transfer(record: Mapping[str, Any]) -> Transfer:
    if record["kind"] not in KINDS:
        raise ValueError(f"a transfer of kind {excerpt(record['kind'])}")
    ends = (_number(record["after"]), _number(record["before"]), _number(record.get("stays", 0)))
    return Transfer(record["kind"], _number(record["value"]), *ends)


def schedule_of(trace: Trace, budget: int, step_ms: float | None = None) -> Schedule:
    """The schedule that the engine follows at the end of a trace: of those it makes, the one that is
    predicted to be fastest.

    The trace needs four equal iterations. An operator's workspace is a value that it creates and frees.
    Durations are the device's own, where the trace has them (docs/annex.md).

    Args:
        trace: of one device. Recorded transfers do not count.
        budget: bytes of device memory, as for `enable`.
        step_ms: a measured step in core, to which durations are scaled. None: as recorded.

    Raises:
        ValueError: storages of several devices; no iteration that repeats; no durations.
    """
    if len({it.device for it in trace.storages.values()}) > 1:
        raise ValueError("the trace has storages of more than one device")
    traced = _traced(trace)
    times = operator_times(trace, 0, len(trace.operators), None if trace.groups else step_ms)
    found = _made(traced, times, budget)
    held = device_times(trace, found["operators"])
    if held.first is not None:
        times = operator_times(held.trace, 0, len(trace.operators))
        found = _made(traced, times, budget)
    first, count = found["first"], found["operators"]
    if step_ms is not None:
        scale = step_ms * found["steps"] / sum(times[first : first + count])
        times = [scale * ms for ms in times]
        found = _made(traced, times, budget)
    names = [op.name for op in trace.operators[first : first + count]]
    return _schedule(budget, found, names, times[first:])


def _schedule(budget: int, found: dict[str, Any], names: list[str], times: list[float]) -> Schedule:
    """The iteration that was found, with what was decided for it."""
    uses: list[list[Use]] = [[] for _ in names]
    frees = [list(freed) for freed in found["frees"]]
    for (value, op, writes, creates), in_place in zip(found["uses"], found["in_place"], strict=True):
        uses[op].append(Use(value, writes, creates, in_place))
    values = [Value(bytes, is_persistent) for bytes, is_persistent in found["values"]]
    for at, workspace in enumerate(found["workspaces"]):
        if workspace:
            uses[at].append(Use(len(values), writes=True, creates=True, in_place=False))
            frees[at].append(len(values))
            values.append(Value(workspace, is_persistent=False))
    operators = tuple(
        Operator(name, times[at], tuple(uses[at]), tuple(frees[at])) for at, name in enumerate(names)
    )
    evictions = [(value, op) for op, leaving in enumerate(found["evictions"]) for value in leaving]
    transfers = _transfers(operators, values, evictions, found, found["capacity"])
    return Schedule(budget, found["capacity"], operators, tuple(values), transfers, found["steps"])


def scheduling_ms(trace: Trace, budget: int) -> float:
    """The CPU time of a policy that follows the trace and makes its schedules.

    Raises:
        ValueError: as `schedule_of`.
    """
    traced, times = _traced(trace), operator_times(trace, 0, len(trace.operators), None)
    begin = time.process_time()
    _made(traced, times, budget)
    return (time.process_time() - begin) * 1e3


def _made(traced: list[tuple[Any, ...]], times: list[float], budget: int) -> dict[str, Any]:
    found = _C.schedule_of(traced, times, budget)
    if found is None:
        raise ValueError("the trace has no iteration that repeats; record four or more")
    return found


def _traced(trace: Trace) -> list[tuple[Any, ...]]:
    """The trace as the policy sees it: what an operator did not create is found at its first use."""
    born = {storage for op in trace.operators for storage in op.births}
    steps = [0] * (len(trace.operators) + 1)
    for operators in trace.steps:
        steps[operators] += 1
    rows = []
    for at, op in enumerate(trace.operators):
        found = [name for name in dict.fromkeys((*op.reads, *op.writes)) if name not in born]
        born.update(found)
        sized = [[(name, trace.storages[name].bytes) for name in names] for names in (found, op.births)]
        rows.append(
            (
                op.name,
                op.in_place_ok,
                sized[0],
                op.reads,
                op.writes,
                sized[1],
                op.workspace,
                op.deaths,
                steps[at + 1],
            )
        )
    return rows


def resident_bytes(
    operators: Sequence[Operator],
    values: Sequence[Value],
    evictions: Sequence[tuple[int, int]],
    fetches: Sequence[tuple[int, int, int]],
) -> list[int]:
    """Bytes on the device during each operator, those on their way in included."""
    leave: list[list[int]] = [[] for _ in operators]
    come: list[list[int]] = [[] for _ in operators]
    for value, after in evictions:
        leave[after].append(value)
    for value, after, _ in fetches:
        come[after].append(value)
    resident: set[int] = set()
    levels: list[int] = []
    for _ in range(2):  # the second round is the steady state
        levels = []
        for at, op in enumerate(operators):
            resident.update(use.value for use in op.uses if not use.in_place)
            levels.append(sum(values[value].bytes for value in resident))
            resident.difference_update(leave[at], op.frees)
            resident.update(come[at])
    return levels


def _transfers(
    operators: Sequence[Operator],
    values: Sequence[Value],
    evictions: Sequence[tuple[int, int]],
    decided: Mapping[str, Any],
    capacity: int,
) -> tuple[Transfer, ...]:
    count, fetches = len(operators), decided["fetches"]
    levels = resident_bytes(operators, values, evictions, fetches)
    returns: dict[int, list[int]] = {}
    for value, after, _ in fetches:
        returns.setdefault(value, []).append(after)
    transfers = [Transfer("fetch", value, after, before) for value, after, before in fetches]
    in_place: dict[int, list[int]] = {}
    for at, op in enumerate(operators):
        for use in op.uses:
            if use.in_place:
                in_place.setdefault(use.value, []).append(at)
    for value, after in evictions:
        ends = returns.get(value, []) + in_place.get(value, [])  # it is away until one of these
        away = min(((end - after - 1) % count for end in ends), default=count - 1)
        places = [(after + 1 + step) % count for step in range(away + 1)]
        full = (at for at in places if levels[at] + values[value].bytes > capacity)
        written = _since_written(operators, evictions, value, after)
        kind = "drop" if written is None else "write_back"
        early = written is not None and value in decided["write_backs"][(after - written) % count]
        stays = written if written is not None and early else 0
        transfers.append(Transfer(kind, value, (after - stays) % count, next(full, places[-1]), stays))
    return tuple(transfers)


def _since_written(
    operators: Sequence[Operator], evictions: Sequence[tuple[int, int]], value: int, after: int
) -> int | None:
    """How many operators ago the device's copy changed. None: not since it left the device before."""
    left = {at for each, at in evictions if each == value}
    for back in range(len(operators)):
        at = (after - back) % len(operators)
        if back > 0 and at in left:
            return None
        if any(
            use.value == value and (use.writes or use.creates) and not use.in_place
            for use in operators[at].uses
        ):
            return back
    return None
