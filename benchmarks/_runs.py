"""Runs programs of benchmarks: keeps what they print, watches memory, ends them in time. Without torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 1024**3
LIMIT = 8 * GIB  # of managed memory in a process of bench_residency.py
MOST_BUDGET = LIMIT - GIB // 2  # below the limit, so that the budget and not the limit stops the engine
MARGIN = 6 * GIB  # what a card must have free beside the limit; as in tests/_gpu_guard.py

PERIOD = 0.03  # seconds between samples
LEAST_HOST = 3 * GIB  # a program that leaves the host less is ended, before the kernel ends others
LEAVING = 20.0  # seconds beyond its time that a program has to end by itself
SETTLING = 15.0  # seconds for the device's memory to come back after a program

#: Bytes free on every card.
Reader = Callable[[], Sequence[int] | None]


@dataclass
class Result:
    """What a program printed, and what was seen meanwhile.

    Args:
        status: "ok", or why and how it ended.
        lines: those in JSON. With a reader each has the ``device_bytes`` until then.
        output: the others.
        device_bytes: the most that was taken of the devices, over what was before, since the program has
            printed the line "made"; None without a GPU.
        lowest_free: the fewest bytes that a device had free.
        host_bytes: the most that the host's available memory went down by, pinned memory included.
    """

    status: str = "ok"
    lines: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    device_bytes: int | None = None
    lowest_free: int | None = None
    host_bytes: int | None = None


def environment() -> dict[str, str]:
    """This process's variables without those of torch_uvm; Python finds the package of this folder."""
    own = ("TORCH_UVM", "PYTORCH_ENABLE_UNI")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONUNBUFFERED": "1"}


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

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self, program: subprocess.Popen[str]) -> None:
        self.host_is_short = False
        self._host_before = self._host_low = host_available()
        free = self._free()
        self._free_before, self._free_low, self._lowest = sum(free), sum(free), min(free, default=0)
        self._program = program

    def taken(self, again: bool = False) -> int | None:
        """The most bytes of the devices that the program had until now. ``again``: beginning now."""
        if again:
            self._free_low = self._free_before
        self._sample()
        return None if self._read is None else self._free_before - self._free_low

    def end(self, result: Result) -> None:
        """Writes what was seen into the result. Waits for the devices' memory to come back."""
        result.device_bytes = self.taken()
        self._program = None
        result.host_bytes = self._host_before - self._host_low
        if self._read is None:
            return
        result.lowest_free = self._lowest
        deadline = time.monotonic() + SETTLING
        while sum(self._free()) < self._free_before - (64 << 20) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _free(self) -> list[int]:
        return list((self._read() if self._read is not None else None) or [])

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
        if free := self._free():  # otherwise a missing sample
            self._free_low = min(self._free_low, sum(free))
            self._lowest = min(self._lowest, *free)


def kill(program: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, number)


def run_child(
    words: Sequence[str],
    variables: Mapping[str, str],
    seconds: float,
    watch: Watch,
    echo: bool = False,
) -> Result:
    """Runs a program that is to end within so many seconds, and ends it a little later if it has not.

    Lines that begin with ``{"what"`` are taken for JSON. ``echo``: they are also printed.
    """
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
                said = json.loads(line)
                taken = watch.taken(again=said["what"] == "made")
                found.lines.append(said | ({} if taken is None else {"device_bytes": taken}))
                if echo:
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
    elif code < 0:
        found.status = f"died of {signal.Signals(-code).name}"
    elif code != 0:
        errors = [line for line in found.output if "Error" in line]
        found.status = f"failed: {(errors or found.output or ['no output'])[-1][:200]}"
    return found


def say(what: str, **facts: Any) -> None:
    """Prints a line of JSON for `run_child`."""
    print(json.dumps({"what": what} | facts), flush=True)


def python(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]
