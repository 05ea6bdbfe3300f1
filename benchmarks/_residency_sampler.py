"""Samples the device memory in use, by the driver's figures, while another process runs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

MIB = 1024**2


class Reading(NamedTuple):
    used: int  # bytes
    free: int


Reader = Callable[[], Reading]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _card() -> int:
    """The card that is CUDA's device 0. UUIDs in CUDA_VISIBLE_DEVICES are not resolved: card 0 is used."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def nvml_reader() -> Reader:
    """Reads by NVML: microseconds per sample. Creates no CUDA context. Raises OSError without a driver."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(_card(), ctypes.byref(handle)):
        raise OSError("NVML finds no device")

    def read() -> Reading:
        memory = _Memory()
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            raise OSError("NVML gives no reading")
        return Reading(int(memory.used), int(memory.free))

    return read


def nvidia_smi_reader() -> Reader:
    """Reads by nvidia-smi: one process and tens of milliseconds per sample. Raises OSError without
    nvidia-smi."""
    query = ["--query-gpu=memory.used,memory.free", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", f"--id={_card()}", *query]

    def read() -> Reading:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            used, free = done.stdout.split(",")
            return Reading(int(used) * MIB, int(free) * MIB)
        except (subprocess.SubprocessError, ValueError) as error:
            raise OSError(f"nvidia-smi gives no reading: {error}") from None

    read()
    return read


def any_reader() -> tuple[str, Reader] | None:
    """The best available reader and its name; None without a driver."""
    for name, make in (("NVML", nvml_reader), ("nvidia-smi", nvidia_smi_reader)):
        try:
            return name, make()
        except OSError:
            continue
    return None


class Sampler:
    """Samples on its own thread. Timestamps are `time.monotonic()`, equal in all processes.

    Args:
        period: seconds between samples.
        is_quiet: while it returns True nothing is sampled, as a call of the driver may delay others' calls.
    """

    def __init__(
        self, read: Reader, period: float = 0.004, is_quiet: Callable[[], bool] = lambda: False
    ) -> None:
        self._read = read
        self._period = period
        self._is_quiet = is_quiet
        self._samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            if self._is_quiet():
                continue
            try:
                self._samples.append((time.monotonic(), self._read().used))
            except OSError:
                continue  # a missing sample; `peak` is None if all are missing

    def now(self) -> int:
        """Bytes in use now."""
        return self._read().used

    def peak(self, begin: float, end: float) -> int | None:
        """The maximum of the bytes in use from begin to end; None without a sample in between."""
        found = [used for moment, used in list(self._samples) if begin <= moment <= end]
        return max(found, default=None)

    def settle(self, level: int, tolerance: int = 64 * MIB, seconds: float = 10) -> bool:
        """Waits until at most `level` bytes are in use, as after killing a process. Returns whether that
        happened."""
        deadline = time.monotonic() + seconds
        while self._read().used > level + tolerance:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True
