"""Predictions on a card: what `predict` gives, with copies and operators that slow each other down.

`predict` takes the rates of an idle link. Beside other work a card reaches less of them:

- Copies go through slots of device memory, which the residency engine needs (docs/how-it-works.md).
- Operators and copies that run at the same time compete for the device's memory and for its copy engines.
- Kernels that write host memory take ``Card.in_place_written``.
- The host runs the engine's code for each operator, and makes the driver's calls for each transfer.

The figures below were measured on an H200, apart from the workloads that predictions are compared with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_uvm._tools.cards import Card
from torch_uvm._tools.link_lanes import LinkRates
from torch_uvm._tools.predictions import Prediction, Span, predict
from torch_uvm._tools.schedules import Schedule

#: The part of the link's rate that the engine's copies reach: 51 and 52.5 of 55.3 GB/s, the means of one copy
#: of 1 GiB and of copies of 32 pieces ("rates" in benchmarks/results/residency.json). Both ways: 98.1 of
#: 100.7 ("staged" and "plain" in benchmarks/results/copy_overlap.json).
_INTO, _OUT, _BOTH = 0.92, 0.95, 0.974
#: What a copy and operators that run for as long take together, beyond one of them, as a part of it: with
#: copies into the device, out of it, and both. 1 - hidden, the mean of products and sums ("staged" in
#: benchmarks/results/copy_overlap.json).
_LONGER_INTO, _LONGER_OUT, _LONGER_BOTH = 0.17, 0.21, 0.34
#: Above this duration of an operator, less and less of a copy is hidden, in inverse proportion: what fills
#: or leaves a slot waits for a place on the device. Beside attention of 9.5 ms 0.15 are hidden, and beside
#: kernels of 0.2 ms 0.8 ("staged" in benchmarks/results/copy_overlap_h100.json and copy_overlap.json).
_HIDES_MS = 1.8
#: The host's time for the engine at an operator ("operators" in benchmarks/results/residency.json), and for a
#: transfer, as a mixture of experts and T5 have shown it (docs/performance.md).
_OPERATOR_MS, _TRANSFER_MS = 1.8e-3, 0.2

_ROUNDS = 4  #: the durations change by less than a percent after that

_Interval = tuple[float, float]


@dataclass(frozen=True)
class CardPrediction:
    """``step_ms``: the device's time, or ``host_ms`` if that is longer."""

    step_ms: float
    host_ms: float
    device: Prediction


def link_rates(card: Card) -> LinkRates:
    """The rates of an idle link."""
    return LinkRates(card.into, card.out, card.in_place, card.both)


def predict_on(schedule: Schedule, card: Card, host_ms: float = 0.0) -> CardPrediction:
    """The time of an iteration on a card, in the steady state.

    Args:
        host_ms: the host's time to queue the operators without the engine.

    Raises:
        ValueError: an operator needs more room than its schedule leaves.
    """
    rates = LinkRates(
        card.into * _INTO,
        card.out * _OUT,
        _in_place_rate(schedule, card),
        None if card.both is None else card.both * _BOTH,
    )
    found, slowed = predict(schedule, rates), rates
    for _ in range(_ROUNDS if schedule.transfers else 0):
        use = _LinkUse(found)
        slowed = use.rates(rates)
        found = predict(use.stretched(schedule), slowed)
    moved = sum(it.kind != "drop" for it in schedule.transfers)
    host_ms += (len(schedule.operators) * _OPERATOR_MS + moved * _TRANSFER_MS) / schedule.steps
    if not moved and not schedule.bytes_in_place():
        host_ms = 0.0  # nothing moves: the engine is idle, and the durations have the host's time
    return CardPrediction(max(found.step_ms, host_ms), host_ms, found)


def _in_place_rate(schedule: Schedule, card: Card) -> float:
    """Bytes/s of all uses in place together: those that write take longer.

    A temporary that is not used again counts as read. An optimizer may write to its gradients, by its schema,
    and does so only if it scales them.
    """
    last = {use.value: op for op in schedule.operators for use in op.uses}
    read = written = 0
    for op in schedule.operators:
        for use in op.uses:
            value = schedule.values[use.value]
            if use.in_place and use.writes and (value.is_persistent or last[use.value] is not op):
                written += value.bytes
            elif use.in_place:
                read += value.bytes
    if not read + written:
        return card.in_place
    return (read + written) / (read / card.in_place + written / (card.in_place_written or card.in_place))


class _LinkUse:
    """When the link was used in a prediction, alone and beside operators."""

    def __init__(self, found: Prediction) -> None:
        self.compute = found.compute
        self.into, self.out = _intervals(found.into), _intervals(found.out)
        self.both = _overlap(self.into, self.out)

    def rates(self, alone: LinkRates) -> LinkRates:
        """The mean rates of the copies."""
        return replace(
            alone,
            into=alone.into * self._reached(self.into, _LONGER_INTO),
            out=alone.out * self._reached(self.out, _LONGER_OUT),
            both=alone.together * self._reached(self.both, _LONGER_BOTH),
        )

    def _reached(self, copies: Sequence[_Interval], longer: float) -> float:
        """The mean part of their rate that the copies reach. ``longer``: for those of one direction."""
        total = _length(copies)
        if not total:
            return 1.0
        reached = total
        both, beside = _within(self.compute, self.both), _within(self.compute, copies)
        for op, one, two in zip(self.compute, beside, both, strict=True):
            reached -= (one - two) * _part(_longer(longer, op)) + two * _part(_longer(_LONGER_BOTH, op))
        return reached / total

    def stretched(self, schedule: Schedule) -> Schedule:
        """The schedule with operators that take longer where copies run beside them."""
        both = _within(self.compute, self.both)
        into, out = _within(self.compute, self.into), _within(self.compute, self.out)
        operators = []
        for op, span, one, other, two in zip(schedule.operators, self.compute, into, out, both, strict=True):
            more = (one - two) * _part(_longer(_LONGER_INTO, span))
            more += (other - two) * _part(_longer(_LONGER_OUT, span))
            operators.append(replace(op, ms=op.ms + more + two * _part(_longer(_LONGER_BOTH, span))))
        return replace(schedule, operators=tuple(operators))


def _longer(usual: float, operator: Span) -> float:
    """`usual`, and more beside a long operator."""
    ms = operator.end_ms - operator.begin_ms
    return 1 - (1 - usual) * min(1.0, _HIDES_MS / ms) if ms > 0 else usual


def _part(longer: float) -> float:
    return longer / (1 + longer)


def _intervals(spans: Sequence[Span]) -> list[_Interval]:
    return [(max(it.begin_ms, 0.0), it.end_ms) for it in spans if it.end_ms > max(it.begin_ms, 0.0)]


def _length(intervals: Sequence[_Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _overlap(some: Sequence[_Interval], others: Sequence[_Interval]) -> list[_Interval]:
    """Of two lists of intervals that are in order."""
    found = []
    at = beside = 0
    while at < len(some) and beside < len(others):
        begin = max(some[at][0], others[beside][0])
        end = min(some[at][1], others[beside][1])
        if end > begin:
            found.append((begin, end))
        if some[at][1] < others[beside][1]:
            at += 1
        else:
            beside += 1
    return found


def _within(spans: Sequence[Span], intervals: Sequence[_Interval]) -> list[float]:
    """By span, the time of it that the intervals cover."""
    ends = [end for _, end in intervals]
    found = []
    for it in spans:
        covered = 0.0
        for begin, end in intervals[bisect_left(ends, it.begin_ms) :]:
            if begin >= it.end_ms:
                break
            covered += max(0.0, min(end, it.end_ms) - max(begin, it.begin_ms))
        found.append(covered)
    return found
