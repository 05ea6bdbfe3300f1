"""A trace of two equal steps, made longer: then a dry run need not run all that a schedule is made from."""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch_uvm._tools.access_traces import Operator, OperatorGroup, Trace


def repeated(trace: Trace, size: int, steps: int) -> Trace | None:
    """The trace of a dry run, with its last step again and again; None: the step before is another one.

    Steps are alike if their operators are, and use storages of one role: each storage of the step before has
    one in the last step that takes its place everywhere, or is used by both. A storage of the first step may
    also be from before the trace.

    Args:
        size: operators of the last step. What is created and freed behind the last of them is not recorded;
            it is taken from the step before.
        steps: to add.
    """
    count = len(trace.operators)
    if not 0 < size <= count // 2:
        return None
    storages = dict(trace.storages)
    operators = trace.operators[:-1]
    later: dict[int, int] = {}  # by storage, the one with its role a step later
    earlier: dict[int, int] = {}

    def are_alike(before: Operator, op: Operator) -> bool:
        used, used_again = ([*it.reads, -1, *it.writes, -2, *it.births] for it in (before, op))
        sizes = [[storages[name].bytes for name in it.births] for it in (before, op)]
        return (
            (before.name, before.in_place_ok, before.workspace) == (op.name, op.in_place_ok, op.workspace)
            and sizes[0] == sizes[1]
            and len(used) == len(used_again)
            and all(later.setdefault(*it) == it[1] for it in zip(used, used_again, strict=True))
            and all(earlier.setdefault(*it) == it[1] for it in zip(used_again, used, strict=True))
            and {later.get(name) for name in before.deaths} == set(op.deaths)
        )

    if not all(map(are_alike, operators[count - 2 * size :], operators[count - size :])):
        return None
    period_us = trace.operators[-1].time_us - trace.operators[-1 - size].time_us
    groups = trace.groups[:-1]
    resident = {it.operators: it for it in trace.resident if it.operators < count}
    ends = {it: None for it in trace.steps if it < count}  # in order
    numbers = itertools.count(max(storages, default=0) + 1)
    for at in range(count - 1, count + steps * size):
        before = operators[at - size]
        births = [next(numbers) for _ in before.births]
        for old, new in zip(before.births, births, strict=True):
            storages[new] = storages[old]
            later[old] = new
        deaths = [later.get(name, name) for name in before.deaths]
        if any(old == new for old, new in zip(before.deaths, deaths, strict=True)):
            return None  # nothing replaces what is freed
        op = replace(
            before,
            time_us=before.time_us + period_us,
            reads=tuple(later.get(name, name) for name in before.reads),
            writes=tuple(later.get(name, name) for name in before.writes),
            births=births,
            deaths=deaths,
        )
        operators.append(op)
        groups.append(OperatorGroup(at, 1, groups[at - size].us))
        if it := resident.get(at + 1 - size):
            resident[at + 1] = replace(it, operators=at + 1)
        if at + 1 - size in ends:
            ends[at + 1] = None
    return replace(
        trace,
        storages=storages,
        operators=operators,
        groups=groups,
        resident=[*resident.values()],
        steps=[*ends],
    )
