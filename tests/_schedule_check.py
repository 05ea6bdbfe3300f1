"""An independent check of a schedule: it shares no code with what makes it.

For each value the walk below knows where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from _traced_schedules import Schedule


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
            in_place = (at, use.value) in schedule.in_place
            what = "create" if use.creates else "use in place" if in_place else "use"
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
