"""Whether the host runs at full speed. On a machine that is shared with others, a core may take twice as long
for the same work, for seconds, and nothing in the system's figures tells: CPU time grows along.

A probe is a loop of fixed work, on the cores that the main thread and autograd's threads ran on last.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TURNS, TIMES = 30_000, 3  # of the loop, 1 ms, and how often it runs: the shortest counts
PROBES = 60  # to begin with
CALM = 1.2  # multiple of the shortest probe that still is full speed
TASKS = Path("/proc/self/task")


def busy_cores() -> set[int]:
    """Cores of the threads that run operators: the main thread's, and those of autograd."""
    found = set()
    for task in TASKS.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, figures = (task / "stat").read_text().rpartition(") ")
            if int(task.name) == os.getpid() or name.partition("(")[2].startswith("pt_autograd"):
                found.add(int(figures.split()[36]))
    return found


def loop_ms(core: int) -> float:
    """Milliseconds that the core takes for the loop."""
    took = []

    def run() -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        for _ in range(TIMES):
            begin = time.perf_counter()
            for _ in range(TURNS):
                pass
            took.append((time.perf_counter() - begin) * 1e3)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return min(took)


@dataclass
class Watched:
    """``calm``: by probes before and after it, the host was at full speed."""

    calm: bool = False


class HostSpeed:
    """Watches the host of this process."""

    def __init__(self) -> None:
        self.shortest = min(self._probe() for _ in range(PROBES))

    def probe(self) -> float:
        """The longest of the busy cores' times, in multiples of the shortest time until now."""
        took = self._probe()
        self.shortest = min(self.shortest, took)
        return took / self.shortest

    def _probe(self) -> float:
        return max(loop_ms(core) for core in busy_cores())

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watched]:
        """The scope of a measurement, whose end says whether the host was at full speed."""
        before, watched = self.probe(), Watched()
        yield watched
        watched.calm = max(before, self.probe()) <= CALM
