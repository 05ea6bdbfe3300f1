"""Traces in which the device was made to wait, so that the host got ahead: the device's own times.

Where the host is slower than the device, a recorded duration has the host's time. Behind a hold it has not,
as long as the host stays ahead (docs/annex.md).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from torch_uvm._tools.access_traces import OperatorGroup, Trace
from torch_uvm._tools.operator_times import operator_times


@dataclass(frozen=True)
class DeviceTimes:
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
    recorded = operator_times(trace, 0, count)
    groups = []
    for at, op in enumerate(trace.operators):
        behind = range(held + (at - held) % size, count, size)  # as far into the loop
        alike = [recorded[later] for later in behind if trace.operators[later].name == op.name]
        own_ms = statistics.median_low(alike) if alike else recorded[at]
        groups.append(OperatorGroup(at, 1, 1e3 * own_ms))
    program_ms = statistics.median(sum(recorded[at : at + size]) for at in range(first, -1, -size))
    return DeviceTimes(replace(trace, groups=groups, holds=[]), program_ms, first)
