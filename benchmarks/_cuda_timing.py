"""Timers for work on a CUDA device and for calls on the host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]


def device_seconds(call: Call, before: Call | None = None, repetitions: int = 5) -> float:
    """Median seconds from before the call until the device is idle again. Includes the host's time.

    before: restores the initial state; not timed
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
    """Host nanoseconds per call, averaged over `loops` calls. The device may still be busy afterwards."""
    begin = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - begin) / loops


def interleaved(calls: dict[str, Call], repetitions: int, slice_ms: float) -> dict[str, float]:
    """Median nanoseconds of each call. The calls alternate, so that drift affects all of them alike."""
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
    """Measures with the switch off and on, alternately. The time of entering `scope` is not included."""
    figures: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(repetitions + 1):
        for on, each in figures.items():
            with scope(on):
                figure = measure(on)
            if turn:  # the first turn warms the caches
                each.append(figure)
    return figures[False], figures[True]


def median_ratio(these: list[float], those: list[float]) -> float:
    """The median of the ratios of alternating measurements, so that the machine's speed cancels out."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))
