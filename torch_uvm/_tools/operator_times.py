"""Durations of single operators, from the groups of operators that a trace has timed."""

from __future__ import annotations

from torch_uvm._tools.access_traces import Trace


def operator_times(trace: Trace, first: int, end: int, step_ms: float | None = None) -> list[float]:
    """Milliseconds of the operators from ``first`` to before ``end``.

    A timed group's operators share its time in the ratio of the bytes that they use. Operators that no group
    has timed get the mean rate of the others.

    Args:
        step_ms: the sum to which the durations are scaled. None: as recorded.

    Raises:
        ValueError: the trace has no durations, and ``step_ms`` is None.
    """
    weights = []
    for op in trace.operators[first:end]:
        used = sum(trace.storages[name].bytes for name in {*op.reads, *op.writes, *op.births})
        weights.append(used + (1 << 20))  # small operators take a moment, too
    found: list[float | None] = [None] * (end - first)
    for group in trace.groups:
        if first <= group.first and group.first + group.operators <= end:
            places = range(group.first - first, group.first - first + group.operators)
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
