"""A run over time: samples taken by a thread that mostly sleeps, bounded in number for any run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch_uvm import _C

_FIRST_INTERVAL = 0.02  # seconds; doubled whenever there are too many
MOST_SAMPLES = 1200

#: The totals in `stats()`: bytes and milliseconds, and counts.
_TRAFFIC = ("fetched", "written_back", "dropped_clean", "used_in_place", "moved", "waited", "made_room")
_COUNTS = ("plan_hits", "plan_misses", "over_budget", "failures")


@dataclass(frozen=True)
class Sample:
    """Levels at one time, and totals since the beginning.

    Args:
        seconds: since the recording began.
        reserved: managed bytes in total; host: pinned bytes for host copies.
        resident: managed bytes on each device; modelled by the emulator if there is no budget.
        totals: by a name such as "fetched.bytes" or "plan_hits".
        steps: of optimizers.
    """

    seconds: float
    reserved: int = 0
    host: int = 0
    resident: dict[int, int] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    steps: int = 0


def crossed(samples: Sequence[Sample]) -> float:
    """Bytes that crossed the link."""
    kinds = ("fetched", "written_back", "used_in_place")
    return sum(samples[-1].totals.get(f"{it}.bytes", 0) for it in kinds)


def higher(one: Sample, next_one: Sample) -> Sample:
    """Merges two samples: the later one, with the higher levels of both, so that no peak is lost."""
    devices = {**one.resident, **next_one.resident}
    return replace(
        next_one,
        reserved=max(one.reserved, next_one.reserved),
        host=max(one.host, next_one.host),
        resident={it: max(one.resident.get(it, 0), next_one.resident.get(it, 0)) for it in devices},
    )


def thinned(samples: list[Sample]) -> list[Sample]:
    """At most `MOST_SAMPLES`: the first one, and the others in pairs."""
    while len(samples) > MOST_SAMPLES:
        first, *rest = samples
        pairs = zip(rest[0::2], rest[1::2], strict=False)
        left = rest[-1:] if len(rest) % 2 else []
        samples = [first, *(higher(*pair) for pair in pairs), *left]
    return samples


class _Totals:
    """Counters that continue when the script resets the library's."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def add(self, figures: dict[str, float]) -> dict[str, float]:
        for name, count in figures.items():
            if count < self._now.get(name, 0):
                self._before[name] = self._before.get(name, 0) + self._now[name]
        self._now = figures
        return {name: count + self._before.get(name, 0) for name, count in figures.items()}


class Sampler:
    """Takes samples from `start()` to `stop()`.

    Attributes:
        by_step: samples at the ends of the first steps.
        peaks, most_reserved: the most managed bytes on each device, and in total; exact, not sampled.
        budgets: the last one in force of each device that has one, in bytes.
    """

    def __init__(self, now_and_then: Callable[[], None], every: float) -> None:
        """now_and_then: called by the thread every ``every`` seconds."""
        self._began = time.monotonic()
        self._interval = _FIRST_INTERVAL
        self._totals = _Totals()
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self.by_step: list[Sample] = []
        self._steps = 0
        self.peaks: dict[int, int] = {}
        self.most_reserved = 0
        self.budgets: dict[int, int] = {}
        self._ended = threading.Event()
        self._now_and_then = now_and_then
        self._every = every
        self._thread = threading.Thread(target=self._run, name="torch_uvm report", daemon=True)

    def start(self) -> None:
        self.take()
        self._thread.start()

    def stop(self) -> None:
        """Takes the last sample. The thread has ended when this returns."""
        if not self._ended.is_set():
            self._ended.set()
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()
            self.take()

    def _run(self) -> None:
        due = time.monotonic() + self._every
        while not self._ended.wait(self._interval):
            self.take()
            if time.monotonic() >= due:
                self._now_and_then()
                due = time.monotonic() + self._every

    def take(self) -> Sample:
        with self._lock:
            sample = self._measure()
            self._samples.append(sample)
            if len(self._samples) > MOST_SAMPLES:
                self._samples = thinned(self._samples)
                self._interval *= 2
            return sample

    def mark_step(self) -> None:
        """An optimizer's step has ended. The first ones are sampled."""
        self._steps += 1
        if len(self.by_step) < 12:
            self.by_step.append(self.take())

    def _measure(self) -> Sample:
        stats = _C.residency_stats()
        memory = _C.memory_stats(None)
        figures: dict[str, float] = {}
        for name in _TRAFFIC:
            figures |= {f"{name}.{key}": value for key, value in stats[name].items()}
        figures |= {name: stats[name] for name in _COUNTS}
        figures["num_ooms"] = memory["num_ooms"]
        figures["num_alloc_retries"] = memory["num_alloc_retries"]
        resident: dict[int, int] = dict(stats["device_bytes"])
        if not resident and _C.backend() == "emulated" and _C.in_use():
            resident = {index: _C.emu_resident_bytes(index) for index in range(_C.emu_device_count())}
            peaks = {index: _C.emu_peak_resident_bytes(index) for index in resident}
        else:
            peaks = dict(stats["peak_device_bytes"])
        for index, peak in peaks.items():
            self.peaks[index] = max(self.peaks.get(index, 0), peak)
            if (budget := _C.budget(index)) is not None:
                self.budgets[index] = budget
        self.most_reserved = max(self.most_reserved, memory["reserved_bytes.all.peak"])
        return Sample(
            time.monotonic() - self._began,
            memory["reserved_bytes.all.current"],
            stats["host_bytes"],
            resident,
            self._totals.add(figures),
            self._steps,
        )

    @property
    def samples(self) -> list[Sample]:
        with self._lock:
            return list(self._samples)
