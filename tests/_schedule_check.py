"""An independent check of a schedule and its prediction: it shares no code with what makes them.

For each value the walk below knows where it is. `predict` knows at each time what is on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch_uvm._tools.link_lanes import H200, LinkRates
from torch_uvm._tools.predictions import Prediction, Span
from torch_uvm._tools.schedules import Schedule, Transfer

_TINY_MS = 1e-6


def check_schedule(schedule: Schedule) -> list[str]:
    """What is wrong with a schedule; empty: nothing.

    Every use finds its value where the schedule has it. Nothing writes to a value that stays for some
    operators behind its write-back. No operator has more bytes on the device than there is capacity, those
    on their way in included.
    """
    problems: list[str] = []
    count = len(schedule.operators)
    level = [0] * count
    for value, (events, begins_away) in enumerate(_lives(schedule)):
        size = schedule.values[value].bytes
        on_device = not begins_away
        since = 0  # on the device from this operator on
        for at, what in events:
            if what in ("use", "evict") and not on_device:
                problems.append(f"value {value} is on the host at operator {at}: {what}")
            if what == "use in place" and on_device:
                problems.append(f"value {value} is on the device at operator {at}: {what}")
            if what == "fetch" and on_device:
                problems.append(f"value {value} is fetched behind operator {at}, and is on the device")
            if what in ("evict", "free") and on_device:
                for op in range(since, at + 1):
                    level[op] += size
                on_device = False
            elif what in ("fetch", "create") and not on_device:
                on_device, since = True, at + (what == "fetch")
        if on_device:
            for op in range(since, count):
                level[op] += size
        if on_device is begins_away and schedule.values[value].is_persistent:
            problems.append(f"value {value} does not end the iteration where it begins it")
    for it in schedule.transfers:
        for at in ((it.after + step + 1) % count for step in range(it.stays)):
            if any(use.value == it.value and use.writes for use in schedule.operators[at].uses):
                problems.append(f"operator {at} writes to value {it.value} behind its write-back")
    for at, used in enumerate(level):
        if used > schedule.capacity:
            problems.append(
                f"operator {at} has {used} bytes on the device; the capacity is {schedule.capacity}"
            )
    return problems


def _lives(schedule: Schedule) -> Iterator[tuple[list[tuple[int, str]], bool]]:
    """By value: what happens to it, by operator, and whether it begins the iteration off the device."""
    events: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for at, op in enumerate(schedule.operators):
        for use in op.uses:
            what = "create" if use.creates else "use in place" if use.in_place else "use"
            events[use.value].append((at, 0, what))
        for value in op.frees:
            events[value].append((at, 1, "free"))
    for it in schedule.transfers:
        fetches = it.kind == "fetch"
        at = (it.after + it.stays) % len(schedule.operators)
        events[it.value].append((at, 2 if fetches else 1, "fetch" if fetches else "evict"))
    for value in range(len(schedule.values)):
        ordered = [(at, what) for at, _, what in sorted(events[value])]
        # Where the last event leaves it, the next iteration finds it.
        last = next((what for _, what in reversed(ordered) if what != "use"), "create")
        yield ordered, last in ("evict", "free", "use in place")


def check_prediction(schedule: Schedule, found: Prediction, rates: LinkRates | None = None) -> list[str]:
    """What is wrong with the times of a prediction; empty: nothing.

    Operators and each direction of the link do one thing at a time, no faster than their rates, and both
    directions carry no more than the link does. A fetch ends before its operator begins, a write-back begins
    behind its own.
    """
    rates = rates or H200
    problems = [
        f"{name}: number {after.number} begins before number {before.number} ends"
        for name, lane in (("operators", found.compute), ("in", found.into), ("out", found.out))
        for before, after in zip(lane, lane[1:], strict=False)
        if after.begin_ms < before.end_ms - _TINY_MS
    ]
    for lane, rate in ((found.into, rates.into), (found.out, rates.out)):
        for it in lane:
            size = schedule.values[schedule.transfers[it.number].value].bytes
            if (it.end_ms - it.begin_ms) * rate / 1e3 < size * (1 - 1e-9):
                problems.append(f"transfer {it.number} is faster than the link")
    problems += _too_much(schedule, found, rates)
    problems += _late(schedule, found)
    for at, span in enumerate(found.compute):
        if span.end_ms - span.begin_ms < schedule.operators[at].ms - _TINY_MS:
            problems.append(f"operator {at} is faster than with all operands on the device")
    return problems


def _too_much(schedule: Schedule, found: Prediction, rates: LinkRates) -> Iterator[str]:
    """Times from an idle link to the next idle link in which more crosses than the link carries."""
    busy: list[list[float]] = []  # begin, end, bytes
    for it in sorted([*found.into, *found.out], key=lambda span: span.begin_ms):
        if not busy or it.begin_ms > busy[-1][1] + _TINY_MS:
            busy.append([it.begin_ms, it.end_ms, 0.0])
        busy[-1][1] = max(busy[-1][1], it.end_ms)
        busy[-1][2] += schedule.values[schedule.transfers[it.number].value].bytes
    for begin, end, moved in busy:
        if moved > (end - begin) / 1e3 * rates.together * (1 + 1e-9):
            yield f"both directions carry {moved:.0f} bytes from {begin:.3f} to {end:.3f} ms"


def _late(schedule: Schedule, found: Prediction) -> Iterator[str]:
    """Transfers on the wrong side of an operator. What began in the iteration before is not judged."""

    def ends_behind(lane: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
        for it in lane:
            if it.begin_ms >= 0:
                yield it, found.compute[schedule.transfers[it.number].after]

    for it, trigger in ends_behind([*found.into, *found.out]):
        if trigger.end_ms > it.begin_ms + _TINY_MS and trigger.begin_ms <= it.begin_ms:
            yield f"transfer {it.number} begins before operator {trigger.number} ends"
    for it in found.into:
        transfer = schedule.transfers[it.number]
        before = next_user(schedule, transfer)
        need = found.compute[before]
        if before > transfer.after and it.begin_ms >= 0 and need.begin_ms < it.end_ms - _TINY_MS:
            yield f"transfer {it.number} ends behind the begin of operator {before}"


def next_user(schedule: Schedule, fetch: Transfer) -> int:
    """The operator that a fetch is for."""
    users = [at for at, op in enumerate(schedule.operators) if fetch.value in {use.value for use in op.uses}]
    return min(users, key=lambda at: (at - fetch.after - 1) % len(schedule.operators))
