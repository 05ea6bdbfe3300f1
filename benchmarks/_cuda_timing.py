"""Times of work on a CUDA device, and of calls on the host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]


def device_seconds(call: Call, before: Call | None = None, repetitions: int = 5) -> float:
    """Median seconds from before the call until the device is idle again, the host's part included.

    before: brings things to where they start from; not timed
    """
    times = []
    for _ in range(repetitions):
        if before is not None:
            before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def host_nanoseconds(call: Call, loops: int) -> float:
    """Of one call on the host, over so many; the device may still be at work."""
    begin = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - begin) / loops


def interleaved(calls: dict[str, Call], repetitions: int, slice_ms: float) -> dict[str, float]:
    """Median nanoseconds of each call; taken in turns, so that drift hits all alike."""
    loops = {}
    for name, call in calls.items():
        host_nanoseconds(call, 20)  # warm
        loops[name] = max(1, int(slice_ms * 1e6 / host_nanoseconds(call, 20)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            times[name].append(host_nanoseconds(call, loops[name]))
            torch.cuda.synchronize()
    return {name: statistics.median(each) for name, each in times.items()}


def in_turns(
    measure: Callable[[bool], float],
    scope: Callable[[bool], contextlib.AbstractContextManager[Any]],
    repetitions: int,
) -> tuple[list[float], list[float]]:
    """Figures with the switch off and on, one after the other; what `scope` does is not part of them."""
    figures: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(repetitions + 1):
        for on, each in figures.items():
            with scope(on):
                figure = measure(on)
            if turn:  # the first warms the caches
                each.append(figure)
    return figures[False], figures[True]


def median_ratio(these: list[float], those: list[float]) -> float:
    """Of figures that were taken in turns, whatever speed the machine had at each."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))
