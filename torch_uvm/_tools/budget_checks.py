"""At which operators a lower bound checks the budget, and the segments of the iteration between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_uvm._tools.timed_iteration import Iteration

_MORE = 48  #: checks of a refinement


class Segments:
    """The iteration, cut behind the operators at which the budget is checked. What is behind the last one
    belongs to the first segment, of the next round."""

    def __init__(self, iteration: Iteration, checks: Sequence[int]) -> None:
        durations = np.array(iteration.durations_ms)
        self.live = live_bytes(iteration)
        self.checks = checks  #: operators, in order
        self.count = len(checks)
        self.of = np.searchsorted(checks, np.arange(len(durations))) % self.count  #: by operator
        floats = np.array(iteration.floats)
        self.ms = np.bincount(self.of, np.where(floats, 0.0, durations), self.count)
        self.floating_ms = float(durations[floats].sum())


def spread_checks(iteration: Iteration, intervals: int) -> list[int]:
    """Of each of so many intervals of equal time the operator with the most live bytes."""
    durations = np.array(iteration.durations_ms)
    ends = np.cumsum(durations)
    interval = np.minimum((ends - durations / 2) / ends[-1] * intervals, intervals - 1).astype(int)
    live = live_bytes(iteration)
    checks: dict[int, int] = {}
    for at, number in enumerate(interval):
        if number not in checks or live[at] > live[checks[number]]:
            checks[number] = at
    return sorted(checks.values())


def more_checks(iteration: Iteration, cut: Segments, busy: np.ndarray[Any, Any]) -> list[int]:
    """Divides the segments in which the link is busiest.

    What a segment moves both ways may take the same room within it, as order does not count there.

    Args:
        busy: by segment, bytes that cross the link in both directions.

    Returns:
        Of each of them the operator with the most live bytes behind the check before it.
    """
    size = len(iteration.durations_ms)
    found = []
    for segment in np.argsort(-busy, kind="stable")[:_MORE]:
        before, check = cut.checks[segment - 1], cut.checks[segment]
        inside = [at % size for at in range(before + 1, check if check > before else check + size)]
        if inside and busy[segment] > 0:
            found.append(max(inside, key=lambda at: cut.live[at]))
    return found


def live_bytes(iteration: Iteration) -> np.ndarray[Any, Any]:
    """Bytes at each operator if nothing is evicted."""
    size = len(iteration.durations_ms)
    change = np.zeros(size + 1)
    for value in iteration.values:
        # A temporary of the iteration before may last until the one of this iteration has been made.
        begin = 0 if value.is_persistent else value.uses[0].at
        left = size if value.is_persistent else value.lasts(size) + value.kept + 1
        while left > 0:
            end = min(begin + left, size)
            change[begin] += value.bytes
            change[end] -= value.bytes
            begin, left = 0, left - (end - begin)
    return np.cumsum(change)[:size]
