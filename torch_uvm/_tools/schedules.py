"""One iteration of a loop, and what the residency engine predicts for it within a budget.

`TracedLoop` lets the engine's policy follow a recorded trace, and returns what it decides.
Operators are numbered from 0. The iteration repeats: operator 0 follows the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_uvm import _C
from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.cards import H200, LinkRates
from torch_uvm._tools.operator_times import device_times, operator_times

EVERYTHING = 1 << 52  #: a budget in which nothing moves


@dataclass(frozen=True)
class Value:
    """The storages that have one role in every iteration: a parameter, or a temporary of each iteration."""

    bytes: int
    is_persistent: bool


@dataclass(frozen=True)
class Use:
    """An operator's use of a value. ``creates``: the value begins here."""

    value: int
    writes: bool
    creates: bool


@dataclass(frozen=True)
class Operator:
    """``ms``: its duration with all operands on the device. ``frees``: values that end behind it."""

    name: str
    ms: float
    uses: tuple[Use, ...]
    frees: tuple[int, ...]


class Predicted(NamedTuple):
    """What a step takes, in ms; infinite if an operator or a fetch finds no room. Bytes that it fetches,
    writes back, and uses on the host. Bytes of the budget for storages: without staging and reserve."""

    ms: float
    into: int
    out: int
    in_place: int
    capacity: int


@dataclass(frozen=True)
class Iteration:
    """One iteration, with everything on the device.

    Args:
        first: the traced operator that comes first in it.
        steps: of the loop. Two, if storages of a step last until those of the next one have been made.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    first: int
    steps: int

    @property
    def in_core_ms(self) -> float:
        """A step's duration without transfers."""
        return sum(op.ms for op in self.operators) / self.steps


class TracedLoop:
    """A trace's loop, as the engine's policy follows it.

    The trace needs four equal iterations. An operator's workspace is a value that it creates and frees.
    Durations are the device's own, where the trace has them (docs/annex.md).

    Args:
        trace: of one device. Recorded transfers do not count.
        step_ms: a measured step in core, to which durations are scaled. None: as recorded.

    Raises:
        ValueError: storages of several devices; no iteration that repeats; no durations.
    """

    def __init__(self, trace: Trace, step_ms: float | None = None) -> None:
        if len({it.device for it in trace.storages.values()}) > 1:
            raise ValueError("the trace has storages of more than one device")
        count = len(trace.operators)
        self._loop = _C.TracedLoop(traced(trace))
        self._times = operator_times(trace, None if trace.groups else step_ms)
        found = self.decided(EVERYTHING, 0.0, H200, whole=False) if trace.holds or step_ms else None
        #: The trace's own times.
        self.device = device_times(trace, found["operators"] if found else count)
        if self.device.first is not None:
            self._times = operator_times(self.device.trace)
        if found and step_ms:
            first, end = found["first"], found["first"] + found["operators"]
            scale = step_ms * found["steps"] / sum(self._times[first:end])
            self._times = [scale * ms for ms in self._times]
        self.names = [op.name for op in trace.operators]

    def predicted(self, budget: int, host_ms: float, rates: LinkRates) -> Predicted:
        """The figures of the schedule that the engine follows at the end of the trace: of those it makes, the
        one that is predicted to be fastest.

        Args:
            budget: bytes of device memory, as for `enable`.
            host_ms: the host's time to queue the operators of a step.
            rates: of the link.
        """
        found = self.decided(budget, host_ms, rates, whole=False)
        steps = found["steps"]
        into, out, in_place = (each // steps for each in found["bytes"])
        return Predicted(found["predicted_ms"] / steps, into, out, in_place, found["capacity"])

    def iteration(self) -> Iteration:
        """The iteration that the engine recognises."""
        return self.iteration_of(self.decided(EVERYTHING, 0.0, H200, whole=True))

    def iteration_of(self, found: dict[str, Any]) -> Iteration:
        """The iteration of what `decided` returned."""
        first, count = found["first"], found["operators"]
        uses: list[list[Use]] = [[] for _ in range(count)]
        frees = [list(freed) for freed in found["frees"]]
        for value, op, writes, creates in found["uses"]:
            uses[op].append(Use(value, writes, creates))
        values = [Value(bytes, is_persistent) for bytes, is_persistent in found["values"]]
        for at, workspace in enumerate(found["workspaces"]):
            if workspace:
                uses[at].append(Use(len(values), writes=True, creates=True))
                frees[at].append(len(values))
                values.append(Value(workspace, is_persistent=False))
        operators = tuple(
            Operator(self.names[first + at], self._times[first + at], tuple(uses[at]), tuple(frees[at]))
            for at in range(count)
        )
        return Iteration(operators, tuple(values), first, found["steps"])

    def decided(self, budget: int, host_ms: float, rates: LinkRates, *, whole: bool) -> dict[str, Any]:
        """What the policy decides, as the extension has it (csrc/python/schedules.cpp).

        Args:
            whole: with all values, uses and transfers.
        """
        bytes_a_ms = [each / 1e3 for each in (rates.into, rates.out, rates.in_place, rates.together)]
        figures = [*bytes_a_ms, rates.transfer_ms, rates.slowed]
        found = self._loop.schedule(self._times, budget, host_ms, figures, whole)
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
        begins, births = (
            [(name, trace.storages[name].bytes) for name in names] for names in (found, op.births)
        )
        used = (op.name, op.in_place_ok, begins, op.reads, op.writes)
        rows.append((*used, births, op.workspace, op.deaths, steps[at + 1]))
    return rows
