"""Durations of single operators, from the groups of operators that a trace has timed.

Where the host is slower than the device, a recorded duration has the host's time. If the device was made to
wait, so that the host got ahead, it has the device's own, as long as the host stays ahead (docs/annex.md).
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import NamedTuple

from torch_uvm._tools.access_traces import OperatorGroup, Trace


def operator_times(trace: Trace, step_ms: float | None = None) -> list[float]:
    """Milliseconds of each operator.

    A timed group's operators share its time in the ratio of the bytes that they use. Operators that no group
    has timed get the mean rate of the others.

    Args:
        step_ms: the sum to which the durations are scaled. None: as recorded.

    Raises:
        ValueError: the trace has no durations, and ``step_ms`` is None.
    """
    bytes_of = {name: storage.bytes for name, storage in trace.storages.items()}.__getitem__
    weights = [  # small operators take a moment, too
        sum(map(bytes_of, {*op.reads, *op.writes, *op.births}), 1 << 20) for op in trace.operators
    ]
    found: list[float | None] = [None] * len(weights)
    for group in trace.groups:
        places = range(group.first, group.first + group.operators)
        total = sum(weights[at] for at in places)
        for at in places:
            found[at] = group.us / 1e3 * weights[at] / total
    known = sum(ms for ms in found if ms is not None)
    timed = sum(weight for weight, ms in zip(weights, found, strict=True) if ms is not None)
    if not timed and step_ms is None:
        raise ValueError("the trace has no durations, and none of a step is given")
    rate = known / timed if timed else 1.0
    durations = [ms if ms is not None else rate * weight for weight, ms in zip(weights, found, strict=True)]
    if step_ms is not None and not any(durations):
        raise ValueError("no operator takes time: none uses a storage on the device of 256 KiB or more")
    scale = 1.0 if step_ms is None else step_ms / sum(durations)
    return [scale * ms for ms in durations]


class DeviceTimes(NamedTuple):
    """A trace with the device's own times.

    Args:
        program_ms: what an iteration takes at the program's pace: the median of those before the first hold.
            0: not known.
        first: operator of an iteration at the program's pace. None: the trace has the times it had.
    """

    trace: Trace
    program_ms: float = 0.0
    first: int | None = None


def device_times(trace: Trace, size: int) -> DeviceTimes:
    """The trace with the device's own times in all iterations: of each operator the lower median of those
    behind the first hold. The host may fall behind for one of them.

    Args:
        size: operators of an iteration. Without an iteration before the first hold, and one behind it, the
            trace stays as it is.
    """
    count = len(trace.operators)
    if not trace.holds or not size <= trace.holds[0] <= count - size:
        return DeviceTimes(trace)
    held = trace.holds[0]
    first = held - size
    recorded = operator_times(trace)
    groups = []
    for at, op in enumerate(trace.operators):
        behind = range(held + (at - held) % size, count, size)  # as far into the loop
        alike = [recorded[later] for later in behind if trace.operators[later].name == op.name]
        own_ms = statistics.median_low(alike) if alike else recorded[at]
        groups.append(OperatorGroup(at, 1, 1e3 * own_ms))
    program_ms = statistics.median(sum(recorded[at : at + size]) for at in range(first, -1, -size))
    return DeviceTimes(replace(trace, groups=groups, holds=[]), program_ms, first)
