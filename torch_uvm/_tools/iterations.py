"""Where the loop comes round that a log of allocations was made of.

Logs have no marks: what reads RMM's would stumble over them. A loop shows itself by repetition. Its
iterations have the same requests, in sizes and streams, and what is freed was allocated as many rows
before; where the sizes vary, all but the sizes. Where a loop has no such shape, the caller says where it
comes round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch_uvm._tools.allocation_logs import AllocationLog

_WIDTHS = (4, 16)  # of what is looked for further back
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
    """As many iterations of as many events each, over the whole log.

    Raises:
        ValueError: it has fewer events than that, or `count` is none.
    """
    if not 1 <= count <= len(log):
        raise ValueError(f"{count} iterations of a log with {len(log)} events")
    return Iterations(
        tuple(len(log) * part // count for part in range(count + 1)), f"{count}, split evenly as asked"
    )


def at_lines(log: AllocationLog, lines: Sequence[int]) -> Iterations:
    """Iterations that begin at these lines of the file; the last one of them is where the last one ends.

    Raises:
        ValueError: they do not ascend, are fewer than two, or lie beyond the log.
    """
    if len(lines) < 2 or any(after <= before for before, after in pairwise(lines)):
        raise ValueError(f"lines {list(lines)}; expected two or more, ascending")
    last = log.lines[-1] if len(log) else 1
    if lines[0] < 2 or lines[-1] > last + 1:
        raise ValueError(f"lines {list(lines)}; the log's rows are lines 2 to {last}")
    boundaries, at = [], 0
    for line in lines:
        while at < len(log) and log.lines[at] < line:
            at += 1
        boundaries.append(at)
    return Iterations(tuple(boundaries), f"{len(lines) - 1}, from the lines that were given")


def find(log: AllocationLog) -> Iterations:
    """The loop that covers the most of the log, if that is half of it or more.

    Of its rows, those are the boundaries where the fewest bytes are live: that is between two steps of a
    training, or near it. What is before the first iteration that repeats is in none, and so is what is left
    after the last boundary.
    """
    for sizes, how in ((True, "by repetition"), (False, "by repetition but for sizes")):
        loop = _repetition(_tokens(log, sizes))
        if loop is None or loop.end - loop.begin < len(log) // 2:
            continue
        levels = _live_bytes(log)
        # levels[i] is live before event i. A boundary within the last whole period, then back from there.
        ends = range(loop.end - loop.period + 1, loop.end + 1)
        last = min(ends, key=lambda at: (levels[at], -at))
        boundaries = list(range(last, loop.begin - 1, -loop.period))[::-1]
        count = len(boundaries) - 1
        if count >= 2:
            return Iterations(tuple(boundaries), f"{count} of {loop.period} rows, found {how}")
    return Iterations((0, len(log)), "1, the whole log: no loop was found in it")


def _tokens(log: AllocationLog, sizes: bool) -> list[Hashable]:
    """What makes two events alike: kind, stream, size if asked for; of a free, rows since its allocation."""
    born: dict[int, int] = {}
    tokens: list[Hashable] = []
    for at, kind in enumerate(log.kinds):
        distance = 0
        if kind == 0:
            born[log.allocations[at]] = at
        elif kind == 1:
            distance = at - born[log.allocations[at]]
        tokens.append((kind, log.streams[at], log.bytes[at] if sizes else 0, distance))
    return tokens


class _Loop(NamedTuple):
    period: int
    begin: int  # events from here to `end` repeat
    end: int


def _repetition(tokens: list[Hashable]) -> _Loop | None:
    """The longest stretch that repeats with one period, twice at least; among equals, the shortest one."""
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
    """Those that are worth a look: how far back the same few numbers stood, most often."""
    counts: Counter[int] = Counter()
    for width in _WIDTHS:
        seen: dict[tuple[int, ...], int] = {}
        for at in range(len(numbers) - width + 1):
            few = tuple(numbers[at : at + width])
            if few in seen:
                counts[at - seen[few]] += 1
            seen[few] = at
    return [period for period, _ in counts.most_common(_MOST_PERIODS)]


def _live_bytes(log: AllocationLog) -> list[int]:
    levels = [0]
    for at, kind in enumerate(log.kinds):
        change = log.bytes[at] if kind == 0 else -log.bytes[at] if kind == 1 else 0
        levels.append(levels[-1] + change)
    return levels
