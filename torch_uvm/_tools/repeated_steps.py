"""A trace of two equal steps, made longer: then a dry run need not run all that a schedule is made from."""

from __future__ import annotations

from dataclasses import replace

from torch_uvm._tools.access_traces import OperatorGroup, Trace


def repeated(trace: Trace, size: int, steps: int) -> Trace | None:
    """The trace of a dry run, with its last step again and again; None: the step before is another one.

    Steps are alike if their operators are, with storages of one size and role: an operator before created
    both, in both steps, or both are one that the trace does not create. A storage of the first step may also
    be from before the trace.

    Args:
        size: operators of the last step. What is created and freed behind the last of them is not recorded;
            it is taken from the step before.
        steps: to add.
    """
    count = len(trace.operators)
    if not 0 < size <= count // 2:
        return None
    loop = _Loop(trace, size)
    if not all(loop.repeats(at) for at in range(count - size, count - 1)):
        return None
    for _ in range(1 + steps * size):
        if not loop.add():
            return None
    return loop.trace


class _Loop:
    """The trace without its last operator, and with operators that are added to it."""

    def __init__(self, given: Trace, size: int) -> None:
        self.size = size
        count = len(given.operators)
        self.trace = replace(
            given,
            storages=dict(given.storages),
            operators=given.operators[:-1],
            groups=given.groups[:-1],
            resident=[it for it in given.resident if it.operators < count],
            steps=[it for it in given.steps if it < count],
        )
        self.period_us = given.operators[-1].time_us - given.operators[-1 - size].time_us
        self.next = max(given.storages, default=0) + 1  #: number of the next storage
        #: By storage that an operator creates, that operator, and its number among those.
        self.made: dict[int, tuple[int, int]] = {}
        #: By storage from before the trace, the one that has its role in the last step.
        self.replaced: dict[int, int] = {}
        for at, op in enumerate(self.trace.operators):
            self.made.update((name, (at, number)) for number, name in enumerate(op.births))
        self.resident = {it.operators: it for it in self.trace.resident}
        self.steps = set(self.trace.steps)

    def repeats(self, at: int) -> bool:
        """Whether an operator does what the one a step before does."""
        before, op = self.trace.operators[at - self.size], self.trace.operators[at]
        if (before.name, before.in_place_ok, before.workspace) != (op.name, op.in_place_ok, op.workspace):
            return False
        sizes = [[self.trace.storages[name].bytes for name in it.births] for it in (before, op)]
        used = [(*it.reads, -1, *it.writes, -1, *sorted(it.deaths, key=self._order)) for it in (before, op)]
        return sizes[0] == sizes[1] and len(used[0]) == len(used[1]) and all(map(self._same, *used))

    def _order(self, name: int) -> tuple[int, int]:
        """Of storages that are freed together: what was created before the trace comes first."""
        return self.made.get(name, (-1, 0))

    def _same(self, earlier: int, later: int) -> bool:
        """Whether storages of two steps have one role."""
        made, again = self.made.get(earlier), self.made.get(later)
        if made is not None:
            return again == (made[0] + self.size, made[1])
        if again is not None and again[0] >= len(self.trace.operators) - self.size + 1:
            return False  # of the last step
        return self.replaced.setdefault(earlier, later) == later

    def add(self) -> bool:
        """Adds the operator that comes next; False: it frees what nothing replaces."""
        at = len(self.trace.operators)
        before = self.trace.operators[at - self.size]
        if any(self.replaced.get(name, name) == name and name not in self.made for name in before.deaths):
            return False
        births = list(range(self.next, self.next + len(before.births)))
        self.next += len(births)
        for number, (old, new) in enumerate(zip(before.births, births, strict=True)):
            self.trace.storages[new] = self.trace.storages[old]
            self.made[new] = at, number
        op = replace(
            before,
            time_us=before.time_us + self.period_us,
            reads=tuple(map(self._later, before.reads)),
            writes=tuple(map(self._later, before.writes)),
            births=births,
            deaths=[],
        )
        self.trace.operators.append(op)
        op.deaths.extend(map(self._later, before.deaths))
        self.trace.groups.append(OperatorGroup(at, 1, self.trace.groups[at - self.size].us))
        if it := self.resident.get(at + 1 - self.size):
            self.resident[at + 1] = replace(it, operators=at + 1)
            self.trace.resident.append(self.resident[at + 1])
        if at + 1 - self.size in self.steps:
            self.steps.add(at + 1)
            self.trace.steps.append(at + 1)
        return True

    def _later(self, name: int) -> int:
        """The storage that has this one's role a step later."""
        if name not in self.made:
            return self.replaced.get(name, name)
        at, number = self.made[name]
        return self.trace.operators[at + self.size].births[number]
