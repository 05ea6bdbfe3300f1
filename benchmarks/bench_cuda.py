"""What managed memory costs and gives on a real GPU, next to what was predicted.

Sets a limit of 8 GiB before its first managed allocation, and refuses to start unless each card has sixteen
times that free: managed memory beyond what a card has free can hang it. A few minutes.

    python benchmarks/bench_cuda.py [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _cuda_bare import seconds_to_fill
from _cuda_networks import BATCHES, NETWORKS, make_step
from _cuda_timing import Call, device_seconds, host_nanoseconds, in_turns, interleaved, median_ratio
from _environment import RESULTS, ROOT, describe
from _results import write_results

import torch_uvm
from torch_uvm import _C

sys.path.insert(0, str(ROOT / "tests"))
from _gpu_guard import GIB, MIB, Guard, Refused, check_room

LIMIT = 8 * GIB
KIB = 1024


@dataclass
class Row:
    """One figure. `goal`: what it should reach; `predicted`: what was measured on an H200 by hand before."""

    name: str
    value: float
    unit: str
    goal: str = ""
    predicted: str = ""


Section = Callable[[], list[Row]]


def size_name(count: int) -> str:
    for unit, word in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {word}"
    return f"{count} B"


def scope(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch_uvm.enabled() if on else torch_uvm.disabled()


def clean() -> None:
    gc.collect()
    give_back()


def give_back() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch_uvm.empty_cache()


# --- allocation

# In a process without torch_uvm: what the wrapped allocator costs while it is off is seen against this.
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
    """torch.empty and its free from Python.

    A core may run at half its speed for seconds at a time, Python and all, where others work next to it. So
    the times are of the fastest slice, and a ratio is the median of ratios of slices next to each other.
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
    with torch.cuda.stream(torch.cuda.Stream()):  # may be captured, unlike the default stream: it is asked
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


# --- moves and prefetches


def rate(count: int, seconds: float) -> float:
    return count / seconds / 1e9


_RATES = {32 * MIB: "40 to 42", 128 * MIB: "47", 256 * MIB: "", GIB: "49.8"}
_GOALS = {256 * MIB: ">= 46", GIB: ">= 49"}


def moves() -> list[Row]:
    """A move to the device, its bytes on the host before."""
    rows = []
    for count in (32 * MIB, 128 * MIB, 256 * MIB, GIB):
        x = torch_uvm.ones(count, dtype=torch.uint8, device="cpu")

        def to_host(x: torch.Tensor = x) -> None:
            torch_uvm.prefetch(x, "cpu")

        def to_device(x: torch.Tensor = x) -> None:
            torch_uvm.to(x, "cuda")

        up = device_seconds(to_device, to_host)
        down = device_seconds(to_host, to_device)
        name = size_name(count)
        rows += [
            Row(f"move to the device, {name}", rate(count, up), "GB/s", _GOALS.get(count, ""), _RATES[count]),
            Row(f"prefetch to the host, {name}", rate(count, down), "GB/s", predicted="9.6 to 10.7"),
        ]
        del x, to_host, to_device
        clean()
    return rows


def small_moves() -> list[Row]:
    """What the call costs where nothing has to be moved."""
    x = torch_uvm.ones(1024)
    y = torch_uvm.to(x, "cpu")
    found = interleaved(
        {
            "move to the CPU, resident, non_blocking": lambda: torch_uvm.to(x, "cpu", non_blocking=True),
            "move to the device, resident": lambda: torch_uvm.to(y, "cuda"),
            "x.detach(), for comparison": lambda: x.detach(),
        },
        repetitions=15,
        slice_ms=4,
    )
    return [Row(name, value, "ns") for name, value in found.items()]


def plain_copies() -> list[Row]:
    """Plain .cpu() and .cuda() of managed tensors against native ones."""
    rows = []
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

            off, on = in_turns(timed, scope, 301 if count <= MIB else 15)
            name = f"plain {direction}, {size_name(count)}"
            rows += [
                Row(name, rate(count, statistics.median(on)), "GB/s"),
                Row(f"{name}, on - off", (statistics.median(on) - statistics.median(off)) * 1e6, "us"),
                Row(f"{name}, on / off (time)", median_ratio(on, off), "", "<= 1.05"),
            ]
        del host, native, managed, down, up, copy, timed
        clean()
    return rows


def copy_out() -> list[Row]:
    """Device-resident managed memory to pinned memory and back: how bytes are to leave the device."""
    count = GIB
    x = torch_uvm.ones(count, dtype=torch.uint8)
    torch_uvm.advise(x, preferred_location="cuda")
    torch_uvm.prefetch(x)
    with torch_uvm.disabled():
        pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        native = torch.ones(count, dtype=torch.uint8, device="cuda")
    out = device_seconds(lambda: pinned.copy_(x, non_blocking=True))
    back = device_seconds(lambda: x.copy_(pinned, non_blocking=True))
    native_out = device_seconds(lambda: pinned.copy_(native, non_blocking=True))
    called = device_seconds_of_call(lambda: pinned.copy_(x, non_blocking=True))
    return [
        Row("copy to pinned memory, 1 GiB", rate(count, out), "GB/s", ">= 52", "52.6"),
        Row("copy from pinned memory, 1 GiB", rate(count, back), "GB/s", predicted="51.3"),
        Row("copy of native memory to pinned, 1 GiB", rate(count, native_out), "GB/s", predicted="55.3"),
        Row("the call of the copy to pinned, 1 GiB", called * 1e6, "us", predicted="asynchronous"),
    ]


def device_seconds_of_call(call: Call) -> float:
    """Seconds that the call itself takes, with the device idle before; its work is waited for afterwards."""
    torch.cuda.synchronize()
    nanoseconds = []
    for _ in range(5):
        nanoseconds.append(host_nanoseconds(call, 1))
        torch.cuda.synchronize()
    return sorted(nanoseconds)[2] * 1e-9


def first_touch() -> list[Row]:
    """A kernel fills fresh managed memory, populated by a prefetch as ours is, or by its own faults.

    In turns with the same by CUDA's bare calls: a prefetch keeps a core busy, and that core may be slow.
    Nothing idles in between, as nothing does in a program at work: after 30 ms without a call the next ones
    take 0.1 to 0.4 ms longer, the bare ones, too.
    """
    clean()
    count = 256 * MIB

    def fill() -> None:
        torch.empty(count, dtype=torch.uint8, device="cuda").fill_(1)

    def ours(populate: str) -> float:
        give_back()
        _C.set_option("populate", populate)
        with scope(True):
            return device_seconds(fill, repetitions=1)

    def bare() -> float:
        give_back()
        return seconds_to_fill(count)

    in_order = [(ours("true"), bare()) for _ in range(16)][1:]  # the first warms the driver
    seconds = {
        "populated": [ours_ for ours_, _ in in_order],
        "by bare CUDA calls": [bare_ for _, bare_ in in_order],
        "by faults": [ours("false") for _ in range(5)],
    }
    _C.set_option("populate", "true")
    goals = {"populated": (">= 250", "280"), "by faults": ("", "10.6")}
    rows = [
        Row(
            f"fresh 256 MiB filled, {word}",
            rate(count, statistics.median(each)),
            "GB/s",
            *goals.get(word, ()),
        )
        for word, each in seconds.items()
    ]
    ratio = median_ratio(seconds["populated"], seconds["by bare CUDA calls"])
    rows.append(Row("populated / by bare CUDA calls (time)", ratio, ""))
    x = torch_uvm.empty(count, dtype=torch.uint8)
    again = device_seconds(lambda: x.fill_(1))
    rows.append(Row("filled again", rate(count, again), "GB/s", predicted="> 1500"))
    return rows


def in_place() -> list[Row]:
    """Kernels on host-resident managed memory."""
    count = GIB // 4
    x = torch_uvm.ones(count, device="cpu")
    torch_uvm.advise(x, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(x, "cpu")
    with torch_uvm.disabled():
        out = torch.empty(count, device="cuda")
    label = torch_uvm.to(x, "cuda", non_blocking=True)
    torch_uvm.prefetch(x, "cpu")
    read = device_seconds(lambda: out.copy_(label))
    write = device_seconds(lambda: label.fill_(2))
    return [
        Row("read in place on the host, 1 GiB", rate(4 * count, read), "GB/s", predicted="51.2"),
        Row("written in place on the host, 1 GiB", rate(4 * count, write), "GB/s", predicted="52.5"),
        *adamw_on_the_host(),
    ]


def adamw_on_the_host() -> list[Row]:
    """Fused AdamW with its moments left on the host."""
    count = 128 * MIB  # elements: 512 MiB each of parameter, gradient and two moments
    parameter = torch_uvm.ones(count).requires_grad_()
    parameter.grad = torch_uvm.ones(count)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    with torch_uvm.enabled():
        optimizer.step()
    moments = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
    torch_uvm.advise(moments, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(moments, "cpu")
    seconds = device_seconds(optimizer.step)
    each_way = rate(8 * count, seconds)
    return [Row("fused AdamW, moments on the host, each way", each_way, "GB/s", ">= 41", "41")]


# --- training


def training() -> list[Row]:
    """Steps that fit, with the switch on and off; runtime allocations in a steady step."""
    rows = []
    for name, (make, repetitions) in NETWORKS.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        steps = {on: make_step(make, BATCHES[name], scope(on)) for on in (False, True)}
        for on, step in steps.items():
            with scope(on):
                for _ in range(3):
                    step()
        calls = _C.memory_stats(None)["num_device_alloc"], torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(repetitions):
            for on, step in steps.items():
                with scope(on):
                    seconds[on].append(device_seconds(step, None, repetitions=1))
        made = _C.memory_stats(None)["num_device_alloc"], torch.cuda.memory_stats()["num_device_alloc"]
        off, on_ = (sorted(seconds[on])[repetitions // 2] for on in (False, True))
        rows += [
            Row(f"step of {name}, off", off * 1e3, "ms"),
            Row(f"step of {name}, on", on_ * 1e3, "ms"),
            Row(f"step of {name}, on / off", on_ / off, "", "<= 1.02"),
            Row(f"runtime allocations in its steady steps, {name}", made[1] - calls[1], "", "0", "0"),
            Row(f"of these, managed, {name}", made[0] - calls[0], "", "0", "0"),
        ]
        del steps
        clean()
    return rows


SECTIONS: dict[str, Section] = {
    "allocation": allocation,
    "moves": moves,
    "calls of moves": small_moves,
    "plain copies": plain_copies,
    "copies out": copy_out,
    "first touch": first_touch,
    "in place": in_place,
    "training": training,
}


def device_description() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        driver = done.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "device_memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def run(only: str, document: dict[str, Any], write: Callable[[], None]) -> bool:
    """Every section, what fails included; False if one failed. The results are written after each."""
    fine = True
    for name, section in SECTIONS.items():
        if only not in name:
            continue
        print(f"\n{name}")
        try:
            rows = section()
        except Exception as error:
            fine = False
            document["failures"][name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
        else:
            document["figures"][name] = [asdict(row) for row in rows]
            for row in rows:
                value = f"{row.value:,.0f}" if row.unit == "ns" else f"{row.value:,.3g}"
                print(f"  {row.name:58}{value:>10} {row.unit:5}{row.goal:>9}{row.predicted:>15}", flush=True)
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
    target = args.json or (
        Path(os.environ["OUT"]) / "cuda.json" if "OUT" in os.environ else RESULTS / "cuda.json"
    )
    if _C.backend() != "cuda" or not torch.cuda.is_available():
        sys.exit("bench_cuda.py needs a GPU and a torch_uvm with its CUDA floor")
    try:
        room = check_room(LIMIT)
        guard = Guard(LIMIT).hold()
    except Refused as error:
        sys.exit(f"not safe to run: {error}")
    torch_uvm.ones(1)  # the runtime is made, the allocator is in place

    environment = describe(["python", "benchmarks/bench_cuda.py", *sys.argv[1:]]) | device_description()
    environment |= {"limit": LIMIT, "free_at_start": room}
    document: dict[str, Any] = {"environment": environment, "figures": {}, "failures": {}}

    def write() -> None:
        document["peak_managed_bytes"] = _C.peak_managed_bytes()
        write_results(target, document)

    print(f"{environment['device']}, CUDA {environment['cuda']}, torch {environment['torch']}")
    print(f"  {'':58}{'measured':>10}      {'goal':>9}{'predicted':>15}")
    fine = run(args.only, document, write)
    guard.check()
    print(f"\nFigures are in {target}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
