"""Times of allocations on a GPU, with torch_uvm off, on, and not imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from _cuda_rows import KIB, MIB, Row, scope, size_name
from _cuda_timing import Call, host_nanoseconds, in_turns, median_ratio

# Runs without torch_uvm: the baseline for the cost of the wrapped allocator while it is off.
_NATIVE = """
import json, sys, time
import torch
def least(size):
    def empty():
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(101):
        begin = time.perf_counter_ns()
        for _ in range(1000):
            empty()
        found.append((time.perf_counter_ns() - begin) / 1000)
    return min(found)
assert "torch_uvm" not in sys.modules
print(json.dumps([least(int(size)) for size in sys.argv[1:]]))
"""
_SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)


def native_empty() -> list[float]:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCH_UVM", "PYTORCH_ENABLE_UNI"))
    }
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, "-c", _NATIVE, *map(str, _SIZES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return [float(value) for value in json.loads(done.stdout)]


def allocation() -> list[Row]:
    """Times torch.empty and its free from Python.

    A core may run at half its speed for seconds while neighbouring cores are busy. Each time is therefore
    that of the fastest slice, and a ratio is the median of the ratios of adjacent slices.
    """
    rows = []
    for size, alone in zip(_SIZES, native_empty(), strict=True):

        def empty(size: int = size) -> object:
            return torch.empty(size, dtype=torch.uint8, device="cuda")

        off, on, ratio = switched(empty)
        name = f"empty + free, {size_name(size)}"
        rows += [
            Row(f"{name}, without torch_uvm", alone, "ns", predicted="1980 to 4000"),
            Row(f"{name}, off", off, "ns"),
            Row(f"{name}, on", on, "ns"),
            Row(f"{name}, on / off", ratio, "", "<= 1.05", "0.99"),
        ]
    with torch.cuda.stream(
        torch.cuda.Stream()
    ):  # a side stream may be capturing, so the allocator queries it
        ratio = switched(lambda: torch.empty(KIB, dtype=torch.uint8, device="cuda"))[2]
    rows.append(Row("empty + free, 1 KiB, on a stream of its own, on / off", ratio, "", "<= 1.05"))
    return rows


def switched(call: Call, slice_ms: float = 2) -> tuple[float, float, float]:
    """Nanoseconds with the switch off, with it on, and the ratio of the two."""
    with scope(False):
        loops = max(1, int(slice_ms * 1e6 / host_nanoseconds(call, 200)))

    def once(on: bool) -> float:
        host_nanoseconds(call, 20)
        return host_nanoseconds(call, loops)

    off, on = in_turns(once, scope, 51)
    return min(off), min(on), median_ratio(on, off)
