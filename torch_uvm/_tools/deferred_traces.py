"""What a recorded loop would be with `optimizer="deferred"`: updates right before a parameter's next use."""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch_uvm._tools.access_traces import Operator, OperatorGroup, Trace
from torch_uvm._tools.operator_times import operator_times

_FUSED = "aten::_fused_"
_LEAST = 256 << 10  #: bytes; smaller parameters are updated at once (docs/how-it-works.md)


def deferred(trace: Trace) -> Trace | None:
    """The trace with deferred updates; None: its optimizers are not fused, or none has a large parameter.

    A fused optimizer has lists of parameters, gradients and states in one order, and may write all of them.
    So the update of a parameter is the part that has one of each.
    """
    if any(op.name.startswith(("aten::_foreach_addcdiv", "aten::addcdiv")) for op in trace.operators):
        return None
    times = operator_times(trace, None if trace.groups else 1.0)
    loop = _Deferring(trace, times)
    for at, op in enumerate(trace.operators):
        loop.add(at, op)
    return loop.result() if loop.deferred else None


def _updates(trace: Trace, op: Operator) -> list[tuple[int, ...]]:
    """By large parameter, the storages of its update."""
    if not op.name.startswith(_FUSED):
        return []
    large = [name for name in op.writes if trace.storages[name].bytes >= _LEAST]
    sizes = [trace.storages[name].bytes for name in large]
    for lists in (4, 3, 2):  # parameter, gradient, and up to two states
        count, rest = divmod(len(large), lists)
        if not rest and all(sizes[at] == sizes[at % count] for at in range(len(sizes))):
            return [tuple(large[at::count]) for at in range(count)]
    return []


class _Deferring:
    def __init__(self, trace: Trace, times: list[float]) -> None:
        self.trace, self.times = trace, times
        self.timed: list[tuple[Operator, float]] = []  #: with ms
        self.begun: list[int] = [0]  #: by operator of the trace, how many of the result have begun after it
        self.pending: dict[int, tuple[tuple[int, ...], float]] = {}  #: by storage: its update, and its ms
        self.freed: set[int] = set()  #: storages that the script has freed, and an update still needs
        self.deferred = 0
        self.storages = dict(trace.storages)
        self.names = itertools.count(max(trace.storages, default=0) + 1)
        self._add_those_before()

    def _add_those_before(self) -> None:
        """Begins with the updates that the step before the trace left, with gradients of their own."""
        made = {name for op in self.trace.operators for name in op.births}
        known: set[int] = set()
        for at, op in enumerate(self.trace.operators):
            for update in _updates(self.trace, op):
                if known.isdisjoint(update):
                    before = tuple(self._like(name) if name in made else name for name in update)
                    self.freed.update(set(before).difference(update))
                    self._defer(at, op, before)
                known.update(name for name in update if name not in made)

    def _like(self, name: int) -> int:
        new = next(self.names)
        self.storages[new] = replace(self.storages[name], resident=True)
        return new

    def _defer(self, at: int, op: Operator, update: tuple[int, ...]) -> None:
        used = self._bytes({*op.reads, *op.writes})
        took = self.times[at] * self._bytes(set(update)) / used
        self.pending.update(dict.fromkeys(update, (update, took)))

    def add(self, at: int, op: Operator) -> None:
        for name in dict.fromkeys((*op.reads, *op.writes)):
            if name in self.pending:
                self._update(name, op.time_us)
        updates = _updates(self.trace, op)
        later = {name for update in updates for name in update}
        kept = [name for name in op.deaths if name in later or name in self.pending]
        self.freed.update(kept)
        took = self.times[at]
        if later or kept:
            used = self._bytes({*op.reads, *op.writes}) or 1
            op = replace(
                op,
                reads=tuple(name for name in op.reads if name not in later),
                writes=tuple(name for name in op.writes if name not in later),
                deaths=[name for name in op.deaths if name not in kept],
            )
            if updates:
                took *= self._bytes({*op.reads, *op.writes}) / used
        self.timed.append((op, took))
        for update in updates:
            self.deferred += 1
            self._defer(at, self.trace.operators[at], update)
        self.begun.append(len(self.timed))

    def _update(self, name: int, time_us: float) -> None:
        update, took = self.pending[name]
        deaths = [each for each in update if each in self.freed]
        self.freed.difference_update(update)
        for each in update:
            del self.pending[each]
        self.timed.append((Operator(f"{_FUSED}update", time_us, True, (), update, [], deaths), took))

    def _bytes(self, names: set[int]) -> int:
        return sum(self.storages[name].bytes for name in names)

    def result(self) -> Trace:
        groups = [OperatorGroup(at, 1, ms * 1e3) for at, (_, ms) in enumerate(self.timed)]
        return replace(
            self.trace,
            storages=self.storages,
            operators=[op for op, _ in self.timed],
            groups=groups,
            transfers=[],
            resident=[replace(it, operators=self.begun[it.operators]) for it in self.trace.resident],
            steps=[self.begun[it] for it in self.trace.steps],
            holds=[self.begun[it] for it in self.trace.holds],
        )
