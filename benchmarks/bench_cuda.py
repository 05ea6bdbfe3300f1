"""Costs and rates of managed memory on a GPU.

Sets a limit of 8 GiB before its first managed allocation and refuses to start unless each card has that and
6 GiB free: managed memory beyond a card's free memory can hang it. Takes a few minutes.

    python benchmarks/bench_cuda.py [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _results import RESULTS, ROOT, describe, device_description, write_results

import torch_uvm
from torch_uvm import _C

sys.path.insert(0, str(ROOT / "tests"))
from _gpu_guard import GIB, MIB, Guard, Refused, check_room

LIMIT = 8 * GIB
KIB = 1024
Call = Callable[[], object]


@dataclass
class Row:
    """One figure, and its goal if it has one."""

    name: str
    value: float
    unit: str
    goal: str = ""


def size_name(count: int) -> str:
    unit, word = next(it for it in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if count % it[0] == 0)
    return f"{count // unit} {word}"


def scope(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch_uvm.enabled() if on else torch_uvm.disabled()


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch_uvm.memory.empty_cache()


def rate(count: int, seconds: float) -> float:
    return count / seconds / 1e9


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
    """Host nanoseconds per call. The device may still be busy afterwards."""
    begin = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - begin) / loops


def in_turns(measure: Callable[[bool], float], repetitions: int) -> tuple[list[float], list[float]]:
    """Measures with the switch off and on, alternately, so that drift affects both alike. The time of
    entering the scope is not included. The first turn warms the caches and does not count."""
    figures: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repetitions + 1):
        for on, each in figures.items():
            with scope(on):
                each.append(measure(on))
    return figures[False][1:], figures[True][1:]


def median_ratio(these: list[float], those: list[float]) -> float:
    """The median of the ratios of alternating measurements, so that the machine's speed cancels out."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


def allocation() -> Iterator[Row]:
    """Times torch.empty and its free from Python.

    A core may run at half its speed for seconds while neighbouring cores are busy. Each time is therefore
    that of the fastest slice, and a ratio is the median of the ratios of adjacent slices.
    """
    for size in (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB):

        def empty(size: int = size) -> object:
            return torch.empty(size, dtype=torch.uint8, device="cuda")

        with scope(False):
            loops = max(1, int(2e6 / host_nanoseconds(empty, 200)))  # 2 ms

        def once(on: bool, empty: Call = empty, loops: int = loops) -> float:
            host_nanoseconds(empty, 20)
            return host_nanoseconds(empty, loops)

        off, on = in_turns(once, 51)
        name = f"empty + free, {size_name(size)}"
        yield Row(f"{name}, off", min(off), "ns")
        yield Row(f"{name}, on", min(on), "ns")
        yield Row(f"{name}, on / off", median_ratio(on, off), "", "<= 1.05")


def moves() -> Iterator[Row]:
    """A move to the device of bytes on the host, and a prefetch back."""
    for count, goal in ((32 * MIB, ""), (128 * MIB, ""), (256 * MIB, ">= 46"), (GIB, ">= 49")):
        x = torch_uvm.memory.ones(count, dtype=torch.uint8, device="cpu")

        def to_host(x: torch.Tensor = x) -> None:
            torch_uvm.prefetch(x, "cpu")

        def to_device(x: torch.Tensor = x) -> None:
            torch_uvm.to(x, "cuda")

        up, down = device_seconds(to_device, to_host), device_seconds(to_host, to_device)
        name = size_name(count)
        yield Row(f"move to the device, {name}", rate(count, up), "GB/s", goal)
        yield Row(f"prefetch to the host, {name}", rate(count, down), "GB/s")
        del x, to_host, to_device
        clean()


def plain_copies() -> Iterator[Row]:
    """Plain .cpu() and .cuda() of managed tensors against native ones."""
    for count in (KIB, MIB, 16 * MIB, 256 * MIB):
        with scope(False):
            host = torch.ones(count, dtype=torch.uint8)
            native = torch.ones(count, dtype=torch.uint8, device="cuda")
        with scope(True):
            managed = torch.ones(count, dtype=torch.uint8, device="cuda")

        def down(on: bool, native: torch.Tensor = native, managed: torch.Tensor = managed) -> object:
            return (managed if on else native).cpu()

        def up(on: bool, host: torch.Tensor = host) -> object:
            return host.cuda()

        for direction, copy in ((".cpu()", down), (".cuda()", up)):

            def timed(on: bool, copy: Callable[[bool], object] = copy) -> float:
                return device_seconds(lambda: copy(on), repetitions=1)

            off, on = in_turns(timed, 301 if count <= MIB else 15)
            name = f"plain {direction}, {size_name(count)}"
            yield Row(name, rate(count, statistics.median(on)), "GB/s")
            yield Row(f"{name}, on - off", (statistics.median(on) - statistics.median(off)) * 1e6, "us")
            yield Row(f"{name}, on / off (time)", median_ratio(on, off), "", "<= 1.05")
        del host, native, managed, down, up, copy, timed
        clean()


def copy_out() -> Iterator[Row]:
    """Copies of device-resident managed memory to pinned memory and back, the path of write-backs."""
    x = torch_uvm.memory.ones(GIB, dtype=torch.uint8)
    torch_uvm.advise(x, preferred_location="cuda")
    torch_uvm.prefetch(x)
    with torch_uvm.disabled():
        pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        native = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    for name, to, source, goal in (
        ("copy to pinned memory, 1 GiB", pinned, x, ">= 52"),
        ("copy from pinned memory, 1 GiB", x, pinned, ""),
        ("copy of native memory to pinned, 1 GiB", pinned, native, ""),
    ):

        def copy(to: torch.Tensor = to, source: torch.Tensor = source) -> object:
            return to.copy_(source, non_blocking=True)

        yield Row(name, rate(GIB, device_seconds(copy)), "GB/s", goal)


def first_touch() -> Iterator[Row]:
    """A kernel fills fresh managed memory, populated by torch_uvm's prefetch or by the kernel's faults.

    There is no idle time between runs: after 30 ms without a call the next calls take 0.1 to 0.4 ms longer.
    """
    count = 256 * MIB

    def fill() -> None:
        torch.empty(count, dtype=torch.uint8, device="cuda").fill_(1)

    for populate, name, goal in (("true", "populated", ">= 250"), ("false", "by faults", "")):
        _C.set_option("populate", populate)
        with scope(True):
            device_seconds(fill, clean, 1)  # warms the driver up
            yield Row(f"fresh 256 MiB filled, {name}", rate(count, device_seconds(fill, clean)), "GB/s", goal)
    _C.set_option("populate", "true")


def in_place() -> Iterator[Row]:
    """Kernels on host-resident managed memory, and fused AdamW with its moments left on the host."""
    count = GIB // 4
    x = torch_uvm.memory.ones(count, device="cpu")
    torch_uvm.advise(x, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(x, "cpu")
    with torch_uvm.disabled():
        out = torch.empty(count, device="cuda")
    label = torch_uvm.to(x, "cuda", non_blocking=True)
    torch_uvm.prefetch(x, "cpu")
    read = rate(4 * count, device_seconds(lambda: out.copy_(label)))
    yield Row("read in place on the host, 1 GiB", read, "GB/s")
    written = rate(4 * count, device_seconds(lambda: label.fill_(2)))
    yield Row("written in place on the host, 1 GiB", written, "GB/s")
    count = 128 * MIB  # elements: 512 MiB each of parameter, gradient and two moments
    parameter = torch_uvm.memory.ones(count).requires_grad_()
    parameter.grad = torch_uvm.memory.ones(count)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    with torch_uvm.enabled():
        optimizer.step()
    moments = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
    torch_uvm.advise(moments, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(moments, "cpu")
    each_way = rate(8 * count, device_seconds(optimizer.step))
    yield Row("fused AdamW, moments on the host, each way", each_way, "GB/s", ">= 41")


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "allocation": allocation,
    "moves": moves,
    "plain copies": plain_copies,
    "copies out": copy_out,
    "first touch": first_touch,
    "in place": in_place,
}


def run(only: str, document: dict[str, Any], write: Callable[[], None]) -> bool:
    """Runs every section and writes the results after each. Returns False if a section failed."""
    fine = True
    for name, section in SECTIONS.items():
        if only not in name:
            continue
        print(f"\n{name}")
        rows = document["figures"].setdefault(name, [])
        try:
            for row in section():
                rows.append(asdict(row))
                value = f"{row.value:,.0f}" if row.unit == "ns" else f"{row.value:,.3g}"
                print(f"  {row.name:58}{value:>10} {row.unit:5}{row.goal:>9}", flush=True)
        except Exception as error:
            fine = False
            document["failures"][name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
        finally:
            torch_uvm.disable()
            clean()
            write()
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--only", default="", metavar="TEXT", help="only sections whose name contains it")
    args = parser.parse_args()
    target = args.json or Path(os.environ.get("OUT", RESULTS)) / "cuda.json"
    if _C.backend() != "cuda" or not torch.cuda.is_available():
        sys.exit("bench_cuda.py needs a GPU and a torch_uvm with its CUDA layer")
    try:
        room = check_room(LIMIT)
        guard = Guard(LIMIT).hold()
    except Refused as error:
        sys.exit(f"not safe to run: {error}")
    torch_uvm.memory.ones(1)  # creates the runtime and installs the allocator
    environment = describe(["python", "benchmarks/bench_cuda.py", *sys.argv[1:]]) | device_description()
    environment |= {"cuda": torch.version.cuda, "limit": LIMIT, "free_at_start": room}
    document: dict[str, Any] = {"environment": environment, "figures": {}, "failures": {}}

    def write() -> None:
        document["peak_managed_bytes"] = _C.peak_managed_bytes()
        write_results(target, document)

    print(f"{environment['device']}, CUDA {environment['cuda']}, torch {environment['torch']}")
    print(f"  {'':58}{'measured':>10}      {'goal':>9}")
    fine = run(args.only, document, write)
    guard.check()
    print(f"\nFigures are in {target}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
