"""The schedule of one iteration of a loop: what crosses the link, when, and what stays where it is.

`schedule_of` lets the residency engine's policy follow a recorded trace, and returns what it decides.
Operators are numbered from 0. The iteration repeats: operator 0 follows the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_uvm import _C
from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.held_traces import device_times
from torch_uvm._tools.link_rates import H200, LinkRates
from torch_uvm._tools.operator_times import operator_times


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
    """``kind``: "fetch", "write_back" or "drop", which copies nothing, because the host has the same bytes.

    Args:
        after: the operator that triggers it, when it has ended.
        stays: how many operators later the device's copy is given up. It is read until then.
    """

    kind: str
    value: int
    after: int
    stays: int = 0


@dataclass(frozen=True)
class Schedule:
    """One iteration within a budget.

    Args:
        capacity: the part of the budget for storages. The rest is for staging, and a reserve against
            fragments.
        predicted_ms: of a step that follows it; infinite if an operator or a fetch finds no room.
        steps: of the loop. Two, if storages of a step last until those of the next one have been made.
    """

    capacity: int
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    transfers: tuple[Transfer, ...]
    predicted_ms: float
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


def schedule_of(
    trace: Trace, budget: int, step_ms: float | None = None, host_ms: float = 0.0, rates: LinkRates = H200
) -> Schedule:
    """The schedule that the engine follows at the end of a trace: of those it makes, the one that is
    predicted to be fastest.

    The trace needs four equal iterations. An operator's workspace is a value that it creates and frees.
    Durations are the device's own, where the trace has them (docs/annex.md).

    Args:
        trace: of one device. Recorded transfers do not count.
        budget: bytes of device memory, as for `enable`.
        step_ms: a measured step in core, to which durations are scaled. None: as recorded.
        host_ms: the host's time to queue the operators of a step.
        rates: of the link, for the predictions.

    Raises:
        ValueError: storages of several devices; no iteration that repeats; no durations.
    """
    if len({it.device for it in trace.storages.values()}) > 1:
        raise ValueError("the trace has storages of more than one device")
    operators = traced(trace)
    times = operator_times(trace, 0, len(trace.operators), None if trace.groups else step_ms)
    found = _made(operators, times, budget, host_ms, rates)
    held = device_times(trace, found["operators"])
    if held.first is not None:
        times = operator_times(held.trace, 0, len(trace.operators))
        found = _made(operators, times, budget, host_ms, rates)
    first, count = found["first"], found["operators"]
    if step_ms is not None:
        scale = step_ms * found["steps"] / sum(times[first : first + count])
        times = [scale * ms for ms in times]
        found = _made(operators, times, budget, host_ms, rates)
    names = [op.name for op in trace.operators[first : first + count]]
    return _schedule(found, names, times[first:])


def _schedule(found: dict[str, Any], names: list[str], times: list[float]) -> Schedule:
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
    transfers = _transfers(operators, found)
    steps = found["steps"]
    predicted_ms = found["predicted_ms"] / steps
    return Schedule(found["capacity"], operators, tuple(values), transfers, predicted_ms, steps)


def _made(
    operators: list[tuple[Any, ...]], times: list[float], budget: int, host_ms: float, rates: LinkRates
) -> dict[str, Any]:
    bytes_a_ms = [each / 1e3 for each in (rates.into, rates.out, rates.in_place, rates.together)]
    found = _C.schedule_of(operators, times, budget, host_ms, [*bytes_a_ms, rates.transfer_ms, rates.slowed])
    if found is None:
        raise ValueError("the trace has no iteration that repeats; record four or more")
    return found


def traced(trace: Trace) -> list[tuple[Any, ...]]:
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


def _transfers(operators: Sequence[Operator], decided: Mapping[str, Any]) -> tuple[Transfer, ...]:
    evictions = [(value, op) for op, leaving in enumerate(decided["evictions"]) for value in leaving]
    transfers = [Transfer("fetch", value, after) for value, after, _ in decided["fetches"]]
    for value, after in evictions:
        written = _since_written(operators, evictions, value, after)
        kind = "drop" if written is None else "write_back"
        early = written is not None and value in decided["write_backs"][(after - written) % len(operators)]
        stays = written if written is not None and early else 0
        transfers.append(Transfer(kind, value, (after - stays) % len(operators), stays))
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
