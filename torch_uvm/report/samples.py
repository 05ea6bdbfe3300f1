"""A run over time: samples taken by a thread that mostly sleeps, bounded in number for any run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch_uvm import _C

_FIRST_INTERVAL = 0.02  # seconds; doubled whenever there are too many samples
_WRITTEN_EVERY = 60.0  # seconds, so that a run that is killed has a page, too
_MARKED_STEPS = 12
MOST_SAMPLES = 1200


@dataclass(frozen=True)
class Sample:
    """Levels at one time, and totals since the beginning.

    Args:
        seconds: since the recording began.
        reserved: managed bytes in total; host: pinned bytes for host copies.
        resident: managed bytes on each device; modelled by the emulator if there is no budget.
        totals: of `stats()`, by a name such as "fetched.bytes" or "plan_hits".
        steps: of optimizers.
    """

    seconds: float
    reserved: int = 0
    host: int = 0
    resident: dict[int, int] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    steps: int = 0


def _higher(one: Sample, next_one: Sample) -> Sample:
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
        pairs = [_higher(*pair) for pair in zip(rest[0::2], rest[1::2], strict=False)]
        samples = [first, *pairs, *(rest[-1:] if len(rest) % 2 else [])]
    return samples


class Sampler:
    """Takes samples from `start()` to `stop()`.

    Attributes:
        step_ends: when the first steps ended, in seconds.
        peaks, most_reserved: the most managed bytes on each device, and in total; exact, not sampled.
        budgets: the last one in force of each device that has one, in bytes.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        """write: called by the thread once a minute."""
        self._began = time.monotonic()
        self._interval = _FIRST_INTERVAL
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._steps = 0
        self.step_ends: list[float] = []
        self.peaks: dict[int, int] = {}
        self.most_reserved = 0
        self.budgets: dict[int, int] = {}
        self._ended = threading.Event()
        self._write = write
        self._thread = threading.Thread(target=self._run, name="torch_uvm report", daemon=True)

    def start(self) -> None:
        self.take()
        self._thread.start()

    def stop(self) -> None:
        """Takes the last sample. The thread has ended when this returns."""
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self.take()

    def _run(self) -> None:
        due = time.monotonic() + _WRITTEN_EVERY
        while not self._ended.wait(self._interval):
            self.take()
            if time.monotonic() >= due:
                self._write()
                due = time.monotonic() + _WRITTEN_EVERY

    def take(self) -> None:
        with self._lock:
            self._samples.append(self._measure())
            if len(self._samples) > MOST_SAMPLES:
                self._samples = thinned(self._samples)
                self._interval *= 2

    def mark_step(self) -> None:
        """An optimizer's step has ended."""
        self._steps += 1
        if len(self.step_ends) < _MARKED_STEPS:
            self.step_ends.append(time.monotonic() - self._began)

    def _measure(self) -> Sample:
        stats, memory = _C.residency_stats(), _C.memory_stats(None)
        totals: dict[str, float] = {name: memory[name] for name in ("num_ooms", "num_alloc_retries")}
        for name, value in stats.items():
            if isinstance(value, int):
                totals[name] = value
            elif "ms" in value:
                totals |= {f"{name}.{key}": figure for key, figure in value.items()}
        resident, peaks = dict(stats["device_bytes"]), dict(stats["peak_device_bytes"])
        if not resident and _C.backend() == "emulated" and _C.in_use():
            resident = {index: _C.emu_resident_bytes(index) for index in range(_C.emu_device_count())}
            peaks = {index: _C.emu_peak_resident_bytes(index) for index in resident}
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
            totals,
            self._steps,
        )

    @property
    def samples(self) -> list[Sample]:
        with self._lock:
            return list(self._samples)
