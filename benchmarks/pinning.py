"""The rate of pinning host memory, by size and method, on a GPU: a cost of the first step under a budget.

    python benchmarks/pinning.py [--json pinning.json]

Methods: cudaHostAlloc, which touches and pins page by page; and cudaHostRegister on huge pages that host
threads have touched, so that only the pinning holds the driver's lock, which every launch waits for. Prints
GB/s of both phases and the longest launch of an empty kernel meanwhile.
"""

from __future__ import annotations

import argparse
import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _environment import describe, driver
from _results import write_results

SIZES = (64 << 20, 256 << 20, 1 << 30)
THREADS = (1, 4, 8)
LARGE_PAGE = 2 << 20


class Launches:
    """Launches a small kernel repeatedly and records the longest call."""

    def __enter__(self) -> Launches:
        self.longest_ms = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        x = torch.zeros(1, device="cuda")
        while not self._stop.is_set():
            begin = time.perf_counter()
            x.add_(1)
            self.longest_ms = max(self.longest_ms, (time.perf_counter() - begin) * 1e3)
            time.sleep(0.0002)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def by_driver(size: int) -> dict[str, Any]:
    with Launches() as launches:
        begin = time.perf_counter()
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        seconds = time.perf_counter() - begin
    del pinned
    return {"way": "cudaHostAlloc", "pin_gb_s": size / seconds / 1e9, "launch_ms": launches.longest_ms}


def touched_first(size: int, threads: int, large_pages: bool) -> dict[str, Any]:
    mapped = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    skipped = -memory.data_ptr() % LARGE_PAGE
    memory = memory[skipped : skipped + size]
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: part[::4096].fill_(0), memory.chunk(threads)))
    touched = time.perf_counter() - begin
    runtime = torch.cuda.cudart()
    with Launches() as launches:
        begin = time.perf_counter()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)))
        seconds = time.perf_counter() - begin
    found = {
        "way": f"{'2 MiB' if large_pages else '4 KiB'} pages touched by {threads}, cudaHostRegister",
        "touch_gb_s": size / touched / 1e9,
        "pin_gb_s": size / seconds / 1e9,
        "both_gb_s": size / (touched + seconds) / 1e9,
        "launch_ms": launches.longest_ms,
    }
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    begin_copy, end_copy = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin_copy.record()
    for _ in range(4):
        device.copy_(memory, non_blocking=True)
    end_copy.record()
    torch.cuda.synchronize()
    found["copy_gb_s"] = 4 * size / begin_copy.elapsed_time(end_copy) / 1e6
    torch.cuda.check_error(int(runtime.cudaHostUnregister(memory.data_ptr())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.cuda.init()
    rows = []
    for size in SIZES:
        ways: list[Callable[[], dict[str, Any]]] = [partial(by_driver, size)]
        for threads in THREADS:
            ways += [partial(touched_first, size, threads, large) for large in (False, True)]
        for way in ways:
            row = {"bytes": size, **way()}
            rows.append(row)
            figures = {key: round(value, 2) for key, value in row.items() if isinstance(value, float)}
            print(f"{size >> 20:5} MiB  {row['way']:52} {figures}", flush=True)
    if arguments.json:
        environment = describe(["python", "benchmarks/pinning.py"])
        environment |= {"device": torch.cuda.get_device_name(), "driver": driver()}
        write_results(arguments.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
