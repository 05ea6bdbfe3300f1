"""A lower bound of a step's time within a budget, for every policy, as a linear programme (needs scipy).

It takes a trace with the operators' durations (docs/annex.md). Recorded transfers do not count. The
programme is a relaxation of the problem that a schedule solves, so no schedule is faster:

- Operators run in the recorded order, and take at least their durations with all operands on the device. The
  iteration repeats: what is evicted at its end comes back at the beginning of the next one.
- Bytes are evicted one by one. There are no fragments, no reserve, no latencies, and no blocks to align.
- Each direction of the link carries at most its rate with the other one idle, and both at most what the link
  carries in all.
- The budget is checked at some operators only (`Segments` of timed_iteration.py). Between two checks the
  order of transfers and uses does not count.
- An operator that may use an operand in place may do so for any part of it. That takes the link's time at the
  rate of such kernels, in both directions if it writes, and the operator's.
- A fused optimizer may update each parameter later, as deferred updates do, until it is used. What is absent
  when the optimizer is called comes until then, and needs no room. It goes again, or stays and needs room.
  The host's copy is old until the updated bytes are back there. Or it is updated in place, on the host.
- What was used last and is not freed yet takes room, or was written back: the program may still read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.cards import H200, LinkRates
from torch_uvm._tools.schedules import Iteration
from torch_uvm._tools.timed_iteration import Segments, TimedIteration, iteration_of

_SCALE = 1e6  # bytes in a unit of the programme

Term: TypeAlias = tuple[int, float]  #: a variable and its factor
Terms: TypeAlias = list[Term]


@dataclass(frozen=True)
class _Use:
    """The uses of a value in one segment. ``held``: one of them is the operator at its end."""

    segment: int
    writes: bool
    in_place_ok: bool
    floats: bool  #: only by operators that may run later
    held: bool
    window: int = 0  #: if it floats: until as many segments later


@dataclass(frozen=True)
class _Later:
    """Variables of a use that floats.

    ``part``: what is absent when the operator is called. ``waits``: what of it is used once it is back for
    the next use; None: nothing. The rest comes and goes for this use alone. ``gone``: by segment from the use
    on, what of that the host has got back.
    """

    part: int
    window: int
    waits: int | None
    gone: list[int]

    def on_the_host(self, step: int) -> Terms:
        """What of ``part`` may be absent, so many segments behind the use."""
        if step <= self.window:
            return [(self.part, 1.0)]
        gone = [(self.gone[min(step, len(self.gone) - 1)], 1.0)]
        return gone if self.waits is None else [*gone, (self.waits, 1.0)]


@dataclass(frozen=True)
class _Pattern:
    """Values of one pattern count as one value, of all their bytes.

    ``kept``: at how many checks behind the last use a temporary is not freed yet.
    """

    uses: tuple[_Use, ...]
    is_persistent: bool
    kept: int


def _patterns(iteration: TimedIteration, cut: Segments) -> dict[_Pattern, float]:
    found: dict[_Pattern, float] = defaultdict(float)
    size = len(iteration.durations_ms)
    for value in iteration.values:
        uses: list[_Use] = []
        latest = -1
        for use in value.uses:
            segment, held = int(cut.of[use.at]), use.at in cut.checks
            window = 0
            if use.floats:
                until = int(cut.of[(use.at + use.later) % size])
                wraps = use.later == size - 1  # behind almost all operators, maybe in the same segment again
                window = cut.count - 1 if wraps else (until - segment) % cut.count
            writes, in_place_ok, floats = use.writes, use.in_place_ok, use.floats
            if uses and uses[-1].segment == segment and use.at > latest:
                last = uses.pop()
                writes, in_place_ok = last.writes or writes, last.in_place_ok and in_place_ok
                floats, held = last.floats and floats, last.held or held
                window = max(last.window, window)
            uses.append(_Use(segment, writes, in_place_ok, floats, held, window))
            latest = use.at
        behind = value.uses[-1].at + 1
        kept = sum((check - behind) % size < value.kept for check in cut.checks)
        found[_Pattern(tuple(uses), value.is_persistent, kept)] += value.bytes / _SCALE
    return found


class LinearProgramme:
    """Variables, and rows `sum <= limit`. It is built row by row, and solved by scipy's HiGHS."""

    def __init__(self) -> None:
        self.most: list[float | None] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.limits: list[float] = []

    def variable(self, most: float | None = None) -> int:
        self.most.append(most)
        return len(self.most) - 1

    def row(self, terms: Sequence[Term], limit: float) -> None:
        for variable, factor in terms:
            self.entries[0].append(len(self.limits))
            self.entries[1].append(variable)
            self.entries[2].append(factor)
        self.limits.append(limit)

    def minimise(self, terms: Iterable[Term]) -> np.ndarray[Any, Any]:
        """The values of the variables at which the sum of the terms is least."""
        rows, columns, factors = self.entries
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.limits), len(self.most))).tocsr()
        cost = np.zeros(len(self.most))
        for variable, factor in terms:
            cost[variable] += factor
        bounds = [(0, most) for most in self.most]
        # On 40 000 variables interior points take 7 s, the simplex method 130.
        solved = linprog(cost, A_ub=matrix, b_ub=self.limits, bounds=bounds, method="highs-ipm")
        if solved.status == 2:
            raise ValueError("the operands and results of an operator alone exceed the budget")
        if solved.status != 0:
            raise RuntimeError(f"the linear programme was not solved: {solved.message}")
        return np.asarray(solved.x)


class _Bound:
    """Builds the programme. A gap is the time between two uses of a pattern."""

    def __init__(self, iteration: TimedIteration, budget: float, rates: LinkRates, intervals: int) -> None:
        self.cut = Segments(iteration, intervals)
        self.rates = rates
        self.programme = LinearProgramme()
        segments = range(self.cut.count)
        self.ms = [self.programme.variable() for _ in segments]
        self.floating = [self.programme.variable() for _ in segments]  #: ms of operators that may run later
        self.into: list[Terms] = [[] for _ in segments]
        self.out: list[Terms] = [[] for _ in segments]
        self.in_place: list[Terms] = [[] for _ in segments]
        self.absent: list[Terms] = [[] for _ in segments]  #: at the check at the segment's end
        for pattern, size in _patterns(iteration, self.cut).items():
            self._add(pattern, size)
        for at in segments:
            too_many = (self.cut.live[self.cut.checks[at]] - budget) / _SCALE
            self.programme.row([(each, -factor) for each, factor in self.absent[at]], -too_many)
            self._add_time(at)
        self.programme.row([(each, -1.0) for each in self.floating], -self.cut.floating_ms)

    def _add_time(self, at: int) -> None:
        ms = self.ms[at]
        self.programme.row([(ms, -1.0), (self.floating[at], 1.0)], -float(self.cut.ms[at]))
        for traffic, rate in (
            (self.into[at], self.rates.into),
            (self.out[at], self.rates.out),
            ([*self.into[at], *self.out[at]], self.rates.together),
            (self.in_place[at], self.rates.in_place),
        ):
            if traffic:
                takes = _SCALE * 1e3 / rate  # ms for one unit
                self.programme.row([*((each, factor * takes) for each, factor in traffic), (ms, -1.0)], 0.0)

    def _add(self, pattern: _Pattern, size: float) -> None:
        uses = pattern.uses
        gaps = list(zip(uses, uses[1:], strict=False))
        if pattern.is_persistent:
            gaps.append((uses[-1], uses[0]))
        followed_by = dict(gaps)
        placed = {}
        floating = {}
        for use in uses:
            if use.floats:
                floating[use] = self._use_later(use, size, followed_by.get(use))
                placed[use] = floating[use].part
            elif use.in_place_ok:
                placed[use] = self._use_in_place(use, size)
        if not any(use.writes for use in uses):
            for begin, end in gaps:
                self._add_gap(begin, end, size, None, placed)
            return
        # The host's copy is good from a use that writes to the next one, as far as it has been written back.
        first = next(number for number, use in enumerate(uses) if use.writes)
        host: Terms = []
        for begin, end in gaps[first:] + gaps[:first]:
            later = floating.get(begin) if begin.writes else None
            if begin.writes:
                host = [(placed[begin], 1.0)] if begin in placed and later is None else []
            host = self._add_gap(begin, end, size, host, placed, later)
        if pattern.kept:
            if uses[-1].writes:
                host = [(placed[uses[-1]], 1.0)] if uses[-1] in placed else []
            self._keep(uses[-1], pattern.kept, size, host)

    def _keep(self, last: _Use, checks: int, size: float, host: Terms) -> None:
        """What nothing uses again is absent from the device once the host has it."""
        begin = last.segment + (1 if last.held else 0)
        for at in range(begin, begin + checks):
            host = self._write_back(at % self.cut.count, host, size)
            absent = self.programme.variable(size)
            self.programme.row([(absent, 1.0), *((each, -factor) for each, factor in host)], 0.0)
            self.absent[at % self.cut.count].append((absent, 1.0))

    def _use_in_place(self, use: _Use, size: float) -> int:
        part = self.programme.variable(size)
        self.into[use.segment].append((part, 1.0))
        self.in_place[use.segment].append((part, 1.0))
        if use.writes:
            self.out[use.segment].append((part, 1.0))
        if use.held:
            self.absent[use.segment].append((part, 1.0))
        return part

    def _use_later(self, use: _Use, size: float, following: _Use | None) -> _Later:
        """``following``: the value's next use; None: it ends."""
        part = self.programme.variable(size)
        if use.held:
            self.absent[use.segment].append((part, 1.0))
        count = self.cut.count
        steps = range(use.window + 1)
        comes = [self.programme.variable(size) for _ in steps]
        stays = [self.programme.variable(size) for _ in steps] if use.in_place_ok else []
        waits = self.programme.variable(size) if following is not None and not following.floats else None
        back = [each for each in (*comes, *stays, waits) if each is not None]
        self.programme.row([(part, 1.0), *((each, -1.0) for each in back)], 0.0)
        for step in steps:
            at = (use.segment + step) % count
            here = [(each[step], 1.0) for each in (comes, stays) if each]
            self.into[at].extend(here)
            self.in_place[at].extend(here[1:])
            self.out[at].extend(here[1:] if use.writes else [])
        gone: list[int] = []
        came: Terms = []
        for step in range((following.segment - use.segment - 1) % count + 1 if following is not None else 0):
            goes, total, there = (self.programme.variable(size) for _ in range(3))
            self.out[(use.segment + step) % count].append((goes, 1.0))
            before = [(each, -1.0) for each in gone[-1:]]
            new = [(each, -1.0) for each in stays[step : step + 1]]
            self.programme.row([(total, 1.0), (goes, -1.0), *new, *before], 0.0)
            if step <= use.window:
                self.programme.row([(there, 1.0), (comes[step], -1.0), *new, *came], 0.0)
                came = [(there, -1.0)]
            self.programme.row([(total, 1.0), *came], 0.0)
            gone.append(total)
        return _Later(part, use.window, waits, gone)

    def _add_gap(
        self,
        begin: _Use,
        end: _Use,
        size: float,
        written: Terms | None,
        placed: dict[_Use, int],
        later: _Later | None = None,
    ) -> Terms:
        """Adds what may be evicted between two uses.

        Args:
            written: the sum is what the host has at the gap's beginning; None: all of it.
            later: of the use at the beginning, if it floats and writes.

        Returns:
            The same for its end.
        """
        programme, count = self.programme, self.cut.count
        evicted, arrives = programme.variable(size), programme.variable(size)
        fetched = -1  # by the check before
        host = list(written or [])
        last = end.segment + (count if end.segment <= begin.segment else 0)
        back: Terms = []
        for at in range(begin.segment + (1 if begin.held else 0), last):
            if written is not None:
                host = self._write_back(at % count, host, size)
            if later is not None:
                back = later.on_the_host(at - begin.segment)
            absent, now = programme.variable(size), programme.variable(size)
            if fetched >= 0:
                programme.row([(fetched, 1.0), (now, -1.0)], 0.0)
                self.into[at % count].extend([(now, 1.0), (fetched, -1.0)])
            else:
                programme.row([(now, 1.0)], 0.0)
            programme.row([(absent, 1.0), (now, 1.0), (evicted, -1.0)], 0.0)
            if written is not None:
                had = ((each, -factor) for each, factor in (*host, *back))
                programme.row([(absent, 1.0), (now, 1.0), *had], 0.0)
            self.absent[at % count].append((absent, 1.0))
            fetched = now
        if later is not None:
            host = [*host, (later.gone[-1], 1.0)]
            if later.waits is not None:
                programme.row([(later.waits, 1.0), (evicted, -1.0)], 0.0)
        # What was evicted is fetched for the next use, or used there in place.
        part = placed.get(end)
        programme.row([(evicted, 1.0), (arrives, -1.0), *([] if part is None else [(part, -1.0)])], 0.0)
        if part is not None:
            programme.row([(part, 1.0), (evicted, -1.0)], 0.0)
            if written is not None:
                programme.row([(part, 1.0), *((each, -factor) for each, factor in host)], 0.0)
        self.into[end.segment].append((arrives, 1.0))
        if fetched >= 0:
            programme.row([(fetched, 1.0), (arrives, -1.0)], 0.0)
            self.into[end.segment].append((fetched, -1.0))
        if written is not None and not end.writes:
            host = self._write_back(end.segment, host, size)
        return host

    def _write_back(self, segment: int, host: Terms, size: float) -> Terms:
        more = self.programme.variable(size)
        self.out[segment].append((more, 1.0))
        found = [*host, (more, 1.0)]
        if len(found) > 8:  # one variable for the sum, so that rows stay short
            total = self.programme.variable(size)
            self.programme.row([(total, 1.0), *((each, -factor) for each, factor in found)], 0.0)
            found = [(total, 1.0)]
        return found


def bound(
    trace: Trace,
    budget: int,
    step_ms: float | None = None,
    rates: LinkRates | None = None,
    intervals: int = 64,
    whole: Iteration | None = None,
) -> dict[str, float]:
    """The least time of a step, and what a fastest step of the programme moves.

    Args:
        trace: of one device.
        budget: device bytes for storages.
        step_ms: a step in core, which the recorded durations are scaled to. None: they stay as they are.
        intervals: of equal time. The budget is checked at one operator of each. More give a higher bound and
            take longer.
        whole: the trace's iteration (`TracedLoop.iteration`), if that is known.

    Returns:
        ``bound_ms``; ``in_core_ms``, the sum of the durations; ``in_place``: bytes of a fastest step.

    Raises:
        ValueError: no step that repeats, no durations, or an operator that alone exceeds the budget.
        RuntimeError: the programme was not solved.
    """
    iteration = iteration_of(trace, step_ms, whole)
    made = _Bound(iteration, budget, rates or H200, intervals)
    solved = made.programme.minimise((each, 1.0) for each in made.ms)
    in_place = sum(solved[each] * factor for terms in made.in_place for each, factor in terms)
    found = {
        "bound_ms": solved[made.ms].sum(),
        "in_core_ms": sum(iteration.durations_ms),
        "in_place": _SCALE * in_place,
    }
    return {name: float(figure) / iteration.steps for name, figure in found.items()}
