"""One iteration of a timed trace, in the steady state: its operators' durations, and the values they use.

A value stands for the storages that have one role in every iteration: a parameter, or a temporary that each
iteration makes anew. Positions are operators of the iteration, and go round: the iteration follows itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.operator_times import operator_times

_FLOATING = "aten::_fused_"  # optimizers; their names have no other operator


@dataclass
class Use:
    """A use of a value at the operator ``at``; of a temporary, the first one is its creation.

    ``floats``: by an operator that may run later, see `Iteration`. ``later``: by how many operators at most.
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
    uses: list[Use] = field(default_factory=list)
    is_persistent: bool = True
    kept: int = 0

    def lasts(self, size: int) -> int:
        """Operators from a temporary's creation to its last use, in an iteration of ``size`` operators."""
        return sum((use.at - before.at - 1) % size + 1 for before, use in pairwise(self.uses))


@dataclass
class Iteration:
    """``durations_ms``: by operator, with all operands on the device.

    ``floats``: by operator, whether it may run later, in parts. That is a fused optimizer, whose updates can
    be deferred, each until its parameter is used.
    """

    durations_ms: list[float]
    floats: list[bool]
    values: list[Value]


def iteration_of(trace: Trace, step_ms: float | None = None) -> Iteration:
    """The last iteration but one of a trace that ends with at least four. The first of them may differ.

    It is recognised by its operators, not by marked steps: optimizers that run in backward hooks mark many.

    Args:
        trace: of one device.
        step_ms: a measured step in core, to which the durations are scaled. None: as recorded.

    Raises:
        ValueError: storages of several devices; no such iterations; no recorded durations and no `step_ms`.
    """
    if len({storage.device for storage in trace.storages.values()}) > 1:
        raise ValueError("the trace has storages of more than one device")
    size = _period(trace)
    if size == 0:
        raise ValueError("the trace does not end with equal iterations; record four or more")
    end = len(trace.operators) - size
    floats = [op.name.startswith(_FLOATING) for op in trace.operators[end - size : end]]
    values, updated = _values(trace, end - size, end)
    _limit_floating(updated, size)
    return Iteration(operator_times(trace, end - size, end, step_ms), floats, values)


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


def _first_uses(trace: Trace) -> dict[int, int]:
    """By temporary, the operator that creates it, or the first one that uses it.

    The trace does not name every operator that creates one: factory functions are missing.
    """
    first: dict[int, int] = {}
    gone: set[int] = set()
    for at, op in enumerate(trace.operators):
        for name in (*op.reads, *op.writes, *op.births):
            first.setdefault(name, at)
        gone.update(op.deaths, op.births)
    return {name: at for name, at in first.items() if name in gone}


def _about(size: int) -> int:
    """Sizes that are close, as those of a growing cache in two iterations: an eighth of an octave."""
    return int(8 * math.log2(size)) if size else -1


def _period(trace: Trace) -> int:
    """The number of operators that repeat at the trace's end, over as many operators as possible; 0: none."""
    made = _first_uses(trace)
    latest: dict[int, int] = {}
    numbers: dict[object, int] = {}  # by sign: numbers are compared faster
    signs = []
    # They count with the operator behind them: the trace may end before the last one's are made.
    born: tuple[int, ...] = ()
    for at, op in enumerate(trace.operators):
        operands = (*op.reads, -1, *op.writes)
        roles = tuple((at - latest.get(name, at), None if name in made else name) for name in operands)
        signs.append(numbers.setdefault((op.name, roles, born), len(numbers)))
        born = tuple(_about(trace.storages[name].bytes) for name in op.births)
        latest.update(dict.fromkeys((*op.reads, *op.writes, *op.births), at))
    signs.reverse()
    count = len(signs)
    found, covered = 0, 0
    # The longest common prefix of the sequence and the sequence from each place on (Z-algorithm).
    common = [0] * count
    left = right = 0
    for at in range(1, count):
        if at < right:
            common[at] = min(right - at, common[at - left])
        while at + common[at] < count and signs[common[at]] == signs[at + common[at]]:
            common[at] += 1
        if at + common[at] > right:
            left, right = at, at + common[at]
        if common[at] >= 2 * at and at + common[at] > covered:
            found, covered = at, at + common[at]
    return found


def _values(trace: Trace, middle: int, end: int) -> tuple[list[Value], dict[int, list[Value]]]:
    """The values, and what each operator that floats writes, in the order of its operands."""
    size = end - middle
    # A temporary of the iteration before has the role of the one that is made at the same place now.
    made: dict[int, tuple[int, int]] = {}
    places: dict[int, int] = {}  # temporaries by operator
    first = _first_uses(trace)
    for name, at in first.items():
        if at >= middle - size:
            made[name] = (at % size, places.setdefault(at, 0))
            places[at] += 1
    lives = {  # operators from the creation to the one behind which it is freed
        made[name]: at - first[name]
        for at, op in enumerate(trace.operators)
        for name in op.deaths
        if name in made and first[name] < end  # those of the last iteration may end with the program
    }
    values: dict[object, Value] = {}
    creations: dict[tuple[int, int], int] = {}  # by role, the index of the creation in Value.uses

    def value_of(name: int) -> Value:
        role = made.get(name, name)
        if role not in values:
            values[role] = Value(trace.storages[name].bytes, is_persistent=role is name)
        return values[role]

    for at in range(middle, end):
        op = trace.operators[at]
        for name in sorted({*op.reads, *op.writes, *op.births}):
            is_made = first.get(name) == at
            writes = is_made or name in op.writes
            floats = op.name.startswith(_FLOATING) and not is_made
            uses = value_of(name).uses
            if is_made:
                creations[made[name]] = len(uses)
            uses.append(Use(at - middle, writes, op.in_place_ok and not is_made, floats))
    updated = {
        at - middle: [value_of(name) for name in trace.operators[at].writes]
        for at in range(middle, end)
        if trace.operators[at].name.startswith(_FLOATING)
    }
    for role, born in creations.items():
        # Uses before the creation are of the temporary that the iteration before made.
        value = values[role]
        value.uses = value.uses[born:] + value.uses[:born]
        used = value.lasts(size)
        value.kept = max(min(lives.get(role, 0), size - 1) - used, 0)
    workspaces = [
        Value(op.workspace, [Use(at, True, False)], is_persistent=False)
        for at, op in enumerate(trace.operators[middle:end])
        if op.workspace
    ]
    return [*values.values(), *workspaces], updated


class Segments:
    """The iteration, cut behind the operators at which a lower bound checks the budget.

    They are, of each of so many intervals of equal time, the operator with the most live bytes. What is
    behind the last one belongs to the first segment, of the next round.
    """

    def __init__(self, iteration: Iteration, intervals: int) -> None:
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


def _live_bytes(iteration: Iteration) -> np.ndarray[Any, Any]:
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
