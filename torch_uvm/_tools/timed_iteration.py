"""One iteration of a timed trace, in the steady state: its operators' durations, and the values they use.

It is the one that the residency engine recognises (schedules.py). Positions are operators of the iteration,
and go round: the iteration follows itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.schedules import Iteration, TracedLoop

_FLOATING = "aten::_fused_"  # optimizers; their names have no other operator


@dataclass
class Use:
    """A use of a value at the operator ``at``; of a temporary, the first one is its creation.

    ``floats``: by an operator that may run later, in parts. ``later``: by how many operators at most.
    """

    at: int
    writes: bool
    in_place_ok: bool
    floats: bool = False
    later: int = 0


@dataclass
class Value:
    """``uses`` are in order. Those of a temporary begin with its creation and may go on in the next round.

    A use at the same operator as the one before it, or at an earlier one, is a round later.

    ``kept``: a temporary is freed behind the operator that comes as many operators later than its last use.
    """

    bytes: int
    is_persistent: bool
    uses: list[Use] = field(default_factory=list)
    kept: int = 0

    def lasts(self, size: int) -> int:
        """Operators from a temporary's creation to its last use, in an iteration of ``size`` operators."""
        return sum((use.at - before.at - 1) % size + 1 for before, use in pairwise(self.uses))


@dataclass
class TimedIteration:
    """``durations_ms``: by operator, with all operands on the device. ``steps``: as of `Iteration`.

    ``floats``: by operator, whether it may run later, in parts. That is a fused optimizer, whose updates can
    be deferred, each until its parameter is used.
    """

    durations_ms: list[float]
    floats: list[bool]
    values: list[Value]
    steps: int


def iteration_of(
    trace: Trace, step_ms: float | None = None, whole: Iteration | None = None
) -> TimedIteration:
    """The iteration of a trace: see `TracedLoop`. It ends with the operator that the trace ends with.

    It is recognised by its operators, not by marked steps: optimizers that run in backward hooks mark many.

    Args:
        whole: what `TracedLoop.iteration` returns, if that is known.
    """
    whole = whole or TracedLoop(trace, step_ms).iteration()
    size = len(whole.operators)
    begin = (len(trace.operators) - whole.first) % size  # in its order
    operators = whole.operators[begin:] + whole.operators[:begin]
    floats = [op.name.startswith(_FLOATING) for op in operators]
    values = [Value(it.bytes, it.is_persistent) for it in whole.values]
    creations: dict[int, int] = {}  # by value, the index of its creation in Value.uses
    updated: dict[int, list[Value]] = {}  # by operator that floats, what it writes, in order
    for at, op in enumerate(operators):
        in_place_ok = trace.operators[whole.first + (begin + at) % size].in_place_ok
        for use in op.uses:
            value = values[use.value]
            if use.creates:
                creations[use.value] = len(value.uses)
            elif floats[at] and use.writes:
                updated.setdefault(at, []).append(value)
            may_move = not use.creates
            value.uses.append(Use(at, use.writes, in_place_ok and may_move, floats[at] and may_move))
    for name, first in creations.items():
        # Uses before the creation are of the temporary that the iteration before made.
        value = values[name]
        value.uses = value.uses[first:] + value.uses[:first]
    for at, op in enumerate(operators):
        for name in op.frees:
            value = values[name]
            value.kept = max((at - value.uses[0].at) % size - value.lasts(size), 0)
    _limit_floating(updated, size)
    return TimedIteration([op.ms for op in operators], floats, values, whole.steps)


def _limit_floating(operands: dict[int, list[Value]], size: int) -> None:
    """Sets `Use.later` at the operators that float: until another operator uses the parameter.

    Args:
        operands: of each of them what it writes, in order: the parameters, then as many values of each kind
            of state. Where the numbers do not show which state is whose, it waits for the last parameter.
    """
    for at, written in operands.items():
        lasting = [value for value in written if value.is_persistent]
        waits = {id(value): _until_used(value, at, size) for value in lasting}
        until = [each for each in waits.values() if each is not None]
        states = [value for value in lasting if waits[id(value)] is None]
        paired = bool(until) and len(states) % len(until) == 0
        for number, value in enumerate(states):
            waits[id(value)] = until[number % len(until)] if paired else max(until, default=size - 1)
        for value in written:
            for use in value.uses:
                if use.at == at:
                    use.later = waits.get(id(value)) or max(until, default=size - 1)


def _until_used(value: Value, at: int, size: int) -> int | None:
    """The number of operators from ``at`` to the next one that cannot float; None: none uses the value."""
    return min(((use.at - at - 1) % size + 1 for use in value.uses if not use.floats), default=None)


class Segments:
    """The iteration, cut behind the operators at which a lower bound checks the budget.

    They are, of each of so many intervals of equal time, the operator with the most live bytes. What is
    behind the last one belongs to the first segment, of the next round.
    """

    def __init__(self, iteration: TimedIteration, intervals: int) -> None:
        durations = np.array(iteration.durations_ms)
        ends = np.cumsum(durations)
        interval = np.minimum((ends - durations / 2) / ends[-1] * intervals, intervals - 1).astype(int)
        self.live = _live_bytes(iteration)
        checks: dict[int, int] = {}
        for at, number in enumerate(interval):
            if number not in checks or self.live[at] > self.live[checks[number]]:
                checks[number] = at
        self.checks = sorted(checks.values())  #: operators
        self.count = len(self.checks)
        self.of = np.searchsorted(self.checks, np.arange(len(durations))) % self.count  #: by operator
        floats = np.array(iteration.floats)
        self.ms = np.bincount(self.of, np.where(floats, 0.0, durations), self.count)
        self.floating_ms = float(durations[floats].sum())


def _live_bytes(iteration: TimedIteration) -> np.ndarray[Any, Any]:
    """Bytes at each operator if nothing is evicted."""
    size = len(iteration.durations_ms)
    change = np.zeros(size + 1)
    for value in iteration.values:
        # A temporary of the iteration before may last until the one of this iteration has been made.
        begin = 0 if value.is_persistent else value.uses[0].at
        left = size if value.is_persistent else value.lasts(size) + value.kept + 1
        while left > 0:
            end = min(begin + left, size)
            change[begin] += value.bytes
            change[end] -= value.bytes
            begin, left = 0, left - (end - begin)
    return np.cumsum(change)[:size]
