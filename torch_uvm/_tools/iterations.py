"""The iterations of the loop that a log of allocations was recorded from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch_uvm._tools.allocation_logs import FAILURE, FREE, AllocationLog

_WIDTHS = (4, 16)  # lengths of the sequences that are compared
_MOST_PERIODS = 32


@dataclass(frozen=True)
class Iterations:
    """`boundaries`: indices of events, ascending; iteration i is from boundary i to boundary i + 1."""

    boundaries: tuple[int, ...]
    how: str  #: in words

    @property
    def count(self) -> int:
        return max(len(self.boundaries) - 1, 0)

    def spans(self) -> list[tuple[int, int]]:
        return list(pairwise(self.boundaries))


def split_evenly(log: AllocationLog, count: int) -> Iterations:
    """Splits the whole log into `count` iterations of equally many events.

    Raises:
        ValueError: the log has fewer events, or `count` is below 1.
    """
    if not 1 <= count <= len(log):
        raise ValueError(f"{count} iterations of a log with {len(log)} events")
    boundaries = tuple(len(log) * part // count for part in range(count + 1))
    return Iterations(boundaries, f"{count}, split evenly as asked")


def find(log: AllocationLog) -> Iterations:
    """The loop that covers most of the log, if it covers at least half.

    A boundary is where the fewest bytes are live: between two steps of a training, or near it. Events before
    the first repeating iteration, and after the last boundary, belong to no iteration.
    """
    for sizes, how in ((True, "by repetition"), (False, "by repetition but for sizes")):
        loop = _repetition(_tokens(log, sizes))
        if loop is None or loop.end - loop.begin < len(log) // 2:
            continue
        levels = [0, *log.live_bytes()]  # levels[i] is live before event i
        # The last boundary is within the last whole period; the others precede it by multiples of the period.
        ends = range(loop.end - loop.period + 1, loop.end + 1)
        last = min(ends, key=lambda at: (levels[at], -at))
        boundaries = list(range(last, loop.begin - 1, -loop.period))[::-1]
        count = len(boundaries) - 1
        if count >= 2:
            return Iterations(tuple(boundaries), f"{count} of {loop.period} rows, found {how}")
    return Iterations((0, len(log)), "1, the whole log: no loop was found in it")


def _tokens(log: AllocationLog, sizes: bool) -> list[Hashable]:
    """What is compared of each event: action, stream, size if `sizes`, and rows since the allocation."""
    created: dict[int, int] = {}
    tokens: list[Hashable] = []
    for at, event in enumerate(log):
        if event.action not in (FREE, FAILURE):
            created[event.allocation] = at
        distance = at - created[event.allocation] if event.action == FREE else 0
        tokens.append((event.action, event.stream, event.bytes if sizes else 0, distance))
    return tokens


class _Loop(NamedTuple):
    period: int
    begin: int  # events from here to `end` repeat
    end: int


def _repetition(tokens: list[Hashable]) -> _Loop | None:
    """The longest sequence that repeats with one period at least twice; the shortest period wins ties."""
    names = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    numbers = [names[token] for token in tokens]
    best: _Loop | None = None
    for period in _periods(numbers):
        run = longest = end = 0
        for at in range(period, len(numbers)):
            run = run + 1 if numbers[at] == numbers[at - period] else 0
            if run > longest:
                longest, end = run, at + 1
        if longest >= period:
            loop = _Loop(period, end - longest - period, end)
            if best is None or (loop.begin - loop.end, loop.period) < (best.begin - best.end, best.period):
                best = loop
    return best


def _periods(numbers: list[int]) -> list[int]:
    """Candidate periods: the most frequent distances to the previous occurrence of the same few events."""
    counts: Counter[int] = Counter()
    for width in _WIDTHS:
        seen: dict[tuple[int, ...], int] = {}
        for at in range(len(numbers) - width + 1):
            few = tuple(numbers[at : at + width])
            if few in seen:
                counts[at - seen[few]] += 1
            seen[few] = at
    return [period for period, _ in counts.most_common(_MOST_PERIODS)]
