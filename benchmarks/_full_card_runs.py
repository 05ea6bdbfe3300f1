"""Runs the programs of full_card.py: keeps what they print, watches memory, ends them in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from _residency_sampler import Reader

PERIOD = 0.03  # seconds between samples
LEAST_HOST = 3 * 1024**3  # bytes: a program that leaves the host less is ended, before the kernel ends others
LEAVING = 20.0  # seconds beyond its time that a program has to end by itself
SETTLING = 15.0  # seconds for the device's memory to come back after a program


@dataclass
class Result:
    """What a program printed, and what was seen meanwhile.

    Args:
        status: "ok", or why and how it ended.
        lines: those in JSON.
        output: the others.
        device_bytes: the most that was taken of the device, over what was before; None without a GPU.
        lowest_free: the fewest bytes that the device had free.
        host_bytes: the most that the host's available memory went down by, pinned memory included.
    """

    status: str = "ok"
    lines: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    device_bytes: int | None = None
    lowest_free: int | None = None
    host_bytes: int | None = None


def host_available() -> int:
    """Bytes that the host has available; in a container, at most what is left of its memory."""
    found = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
    available = int(found) << 10
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        available = min(available, int((group / "memory.max").read_text()) - used)
    return available


class Watch:
    """Samples memory on a thread of its own, while there is a program. Without a reader only the host's."""

    def __init__(self, read: Reader | None) -> None:
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._program: subprocess.Popen[str] | None = None
        self.host_is_short = False

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self, program: subprocess.Popen[str]) -> None:
        self.host_is_short = False
        self._host_before = self._host_low = host_available()
        if self._read is not None:
            before = self._read()
            self._used_before, self._used_high, self._free_low = before.used, before.used, before.free
        self._program = program

    def end(self, result: Result) -> None:
        """Writes what was seen into the result. Waits for the device's memory to come back."""
        self._sample()
        self._program = None
        result.host_bytes = self._host_before - self._host_low
        if self._read is None:
            return
        result.device_bytes = self._used_high - self._used_before
        result.lowest_free = self._free_low
        deadline = time.monotonic() + SETTLING
        while self._read().used > self._used_before + (64 << 20) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            self._sample()

    def _sample(self) -> None:
        program = self._program
        if program is None:
            return
        self._host_low = min(self._host_low, host_available())
        if self._host_low < LEAST_HOST and not self.host_is_short:
            self.host_is_short = True
            kill(program, signal.SIGKILL)
        if self._read is not None:
            with contextlib.suppress(OSError):  # a missing sample
                now = self._read()
                self._used_high = max(self._used_high, now.used)
                self._free_low = min(self._free_low, now.free)


def kill(program: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, number)


def run_child(words: Sequence[str], variables: Mapping[str, str], seconds: float, watch: Watch) -> Result:
    """Runs a program that is to end within so many seconds, and ends it a little later if it has not."""
    found = Result()
    program = subprocess.Popen(
        list(words),
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # so that its descendants are ended with it
    )
    watch.begin(program)
    # An interrupted Python still writes its statistics.
    timers = [
        threading.Timer(seconds + LEAVING, kill, (program, signal.SIGINT)),
        threading.Timer(seconds + 2 * LEAVING, kill, (program, signal.SIGKILL)),
    ]
    for timer in timers:
        timer.start()
    begin = time.monotonic()
    try:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith('{"what"'):
                found.lines.append(json.loads(line))
                print(f"  {line.rstrip()}", flush=True)
            else:
                found.output.append(line.rstrip())
        code = program.wait()
    finally:
        for timer in timers:
            timer.cancel()
        kill(program, signal.SIGKILL)
        program.wait()
        watch.end(found)
    if watch.host_is_short:
        found.status = f"ended: the host had less than {LEAST_HOST >> 30} GiB left"
    elif code != 0 and time.monotonic() - begin > seconds + LEAVING:
        found.status = f"cut off after {seconds + LEAVING:.0f} s"
    elif code != 0:
        errors = [line for line in found.output if "Error" in line]
        found.status = f"failed: {(errors or found.output or ['no output'])[-1][:200]}"
    return found
