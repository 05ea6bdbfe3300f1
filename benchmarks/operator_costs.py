"""What the engine costs the host, and the rates of its copies, outside of training.

    python benchmarks/operator_costs.py [--json FILE] [--small]

In one process, so that ratios compare the same host: "native" is PyTorch's own memory, "off" managed memory
without a budget, "idle" a budget that everything fits into, "awake" a budget that cold memory exceeds, where
nothing of the step has to move. They alternate, and the least time counts: other load only adds time. At most
4 GiB are managed; a GPU must have that and 6 GiB free. `--small` rehearses it on `emu`.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCH_UVM_CONF"] = "limit:4GiB"  # before torch_uvm is imported

import torch
import torch.nn.functional as F
from _results import RESULTS, ROOT, describe, device_description, write_results
from _workloads import TransformerOf, Workload

import torch_uvm

sys.path.insert(0, str(ROOT / "tests"))
from _gpu_guard import GIB, MIB, Guard, check_room

LIMIT = 4 * GIB
LIVE = 64 * 1024  # floats: 256 KiB, the smallest storage that the engine moves
TENSORS = 50
IDLE_AFTER = 40  # steps; then a program that fits has long been idle

Call = Callable[[], object]
Step = Callable[[list[torch.Tensor], int], object]


def seconds(call: Call) -> float:
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    call()
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


# --- operators


def in_place(tensors: list[torch.Tensor], count: int) -> None:
    for number in range(count):
        tensors[number % TENSORS].add_(1)


def temporary(tensors: list[torch.Tensor], count: int) -> None:
    for number in range(count):
        tensors[number % TENSORS] + 1


def tiny(tensors: list[torch.Tensor], count: int) -> None:
    """The result is too small to be moved."""
    for number in range(count):
        tensors[number % TENSORS][:1] + 1  # two operators, one of them a view


def nested(tensors: list[torch.Tensor], count: int) -> None:
    weight = tensors[0][:256].view(16, 16)
    for number in range(count):
        F.linear(tensors[number % TENSORS][:16].view(1, 16), weight)


CASES: dict[str, Step] = {
    "in place, 256 KiB": in_place,
    "a new 256 KiB": temporary,
    "view and add": tiny,
    "two views and linear": nested,
}
LEARNS = {"native": 2, "off": 2, "idle": IDLE_AFTER, "awake": 8}  # steps before the timed ones


def operators(device: torch.device, rounds: int, count: int) -> dict[str, dict[str, float]]:
    """Nanoseconds per call, by case and mode."""
    cold_bytes = 64 * MIB
    budgets = {"off": None, "idle": 2 * GIB, "awake": (TENSORS + 16) * LIVE * 4 + 4 * cold_bytes}
    with torch_uvm.disabled():
        plain = [torch.ones(LIVE, device=device) for _ in range(TENSORS)]
    cold = [torch.ones(cold_bytes // 4, device=device) for _ in range(8)]  # half of it leaves when awake
    tensors = [torch.ones(LIVE, device=device) for _ in range(TENSORS)]
    found: dict[str, dict[str, float]] = {name: {} for name in CASES}
    for _ in range(rounds):
        for mode, learns in LEARNS.items():
            torch_uvm.set_budget(budgets.get(mode), device)
            used = plain if mode == "native" else tensors
            for name, step in CASES.items():
                with torch_uvm.disabled() if mode == "native" else torch_uvm.enabled():
                    times = [seconds(functools.partial(step, used, count)) for _ in range(learns + 10)]
                least = min(times[learns:]) / count * 1e9
                found[name][mode] = min(least, found[name].get(mode, least))
    torch_uvm.set_budget(None, device)
    del cold
    return found


# --- steps that fit


class Training:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.optimizer = workload.optimizer(workload.trained())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.workload.step(self.optimizer)


def watched() -> int:
    """How many operators the engine has seen."""
    stats = torch_uvm.stats()
    return int(stats["plan_hits"] + stats["plan_misses"])


def fits(device: torch.device, shape: TransformerOf, budget: int, rounds: int, block: int) -> dict[str, Any]:
    """Milliseconds of a step, natively and within a budget that it fits, and when the engine became idle."""
    with torch_uvm.disabled(), device:
        native = Training(shape.make(device))
        native.steps(5)
    torch_uvm.set_budget(budget, device)
    with device:
        managed = Training(shape.make(device))
    seen = [watched()]
    for _ in range(IDLE_AFTER):
        managed.steps(1)
        seen.append(watched())
    times: dict[str, list[float]] = {"native": [], "managed": []}
    for _ in range(rounds):
        with torch_uvm.disabled():
            times["native"].append(seconds(functools.partial(native.steps, block)) / block * 1e3)
        times["managed"].append(seconds(functools.partial(managed.steps, block)) / block * 1e3)
    peak = torch_uvm.memory.memory_stats(device)["allocated_bytes.all.peak"]
    found = {
        "budget_over_peak": budget / max(peak, 1),
        "idle_after_steps": seen.index(seen[-1]),
        "watched_while_timed": watched() - seen[-1],
        **{f"{name}_ms": min(each) for name, each in times.items()},
        **{f"{name}_median_ms": statistics.median(each) for name, each in times.items()},
    }
    del managed, native
    torch_uvm.set_budget(None, device)
    return found


# --- rates of copies, and launches beside them


def rates(device: torch.device, size: int, pieces: int) -> dict[str, float]:
    """GB/s of write-backs and fetches of so many bytes in all, by the host's clock: medians of five."""
    torch_uvm.set_budget(size + size // 4, device)
    took: dict[str, list[float]] = {"written_back": [], "fetched": []}
    for _ in range(5):
        moved = [torch.ones(size // 4 // pieces, device=device) for _ in range(pieces)]
        room: list[torch.Tensor] = []

        def push(room: list[torch.Tensor] = room) -> None:
            # This allocation evicts the storages. They are dirty, so they are written back.
            for _ in range(pieces):
                room.append(torch.empty(size // 4 // pieces, device=device).fill_(1))

        def pull(moved: list[torch.Tensor] = moved) -> None:
            with torch_uvm.resident(moved):
                torch.accelerator.synchronize()

        for name, call in (("written_back", push), ("fetched", pull)):
            before = torch_uvm.stats()[name]["bytes"]
            in_s = seconds(call)
            took[name].append((torch_uvm.stats()[name]["bytes"] - before) / in_s / 1e9)
            room.clear()
        del moved, push, pull
    torch_uvm.set_budget(None, device)
    return {name: statistics.median(each) for name, each in took.items()}


def launches(device: torch.device, size: int, count: int, budget: int | None) -> dict[str, float]:
    """Microseconds per launch of a small kernel while another thread cycles through tensors of 8 * size."""
    torch_uvm.set_budget(budget, device)
    tensors = [torch.ones(size // 4, device=device) for _ in range(8)]
    small = torch.ones(64, device=device)
    stream, stop, rounds = torch.Stream(device), threading.Event(), [0]

    def go_around() -> None:
        while not stop.is_set():
            for tensor in tensors:
                tensor.add_(1)
            torch.accelerator.synchronize()
            rounds[0] += 1

    other = threading.Thread(target=go_around)
    other.start()
    times = []
    try:
        while rounds[0] < 3:
            time.sleep(0.01)
        with stream:
            for number in range(count):
                begin = time.perf_counter_ns()
                small.add_(1)
                times.append((time.perf_counter_ns() - begin) / 1e3)
                if number % 200 == 199:
                    stream.synchronize()  # a full launch queue blocks, with and without the engine
    finally:
        stop.set()
        other.join()
    torch_uvm.set_budget(None, device)
    times.sort()
    return {f"p{share}_us": times[int(share / 100 * (count - 1))] for share in (50, 99, 99.9)}


def measure(device: torch.device, small: bool) -> dict[str, Any]:
    moved, piece = (8 * MIB, 2 * MIB) if small else (GIB, GIB // 4)
    shapes = {
        "12 blocks of 512, 512 tokens": (TransformerOf(1, 512, width=512, heads=8), GIB),
        "6 blocks of 2048, 2 048 tokens": (TransformerOf(2, 1024, depth=6), 7 * GIB // 2),
    }
    if small:
        shapes = {"small": (TransformerOf(1, 16, depth=2, width=256, heads=2, dtype=torch.float32), GIB)}
    rounds, block = (2, 5) if small else (10, 20)
    sys.setswitchinterval(20e-6)  # the default of 5 ms would dominate the launches
    with torch.no_grad():
        found: dict[str, Any] = {
            "operators": operators(device, 1 if small else 3, 100 if small else 1000),
            "rates": {f"{count} pieces": rates(device, moved, count) for count in (1, 4 if small else 32)},
            "launches": {
                name: launches(device, piece, 2000 if small else 100_000, budget)
                for name, budget in (("without", None), ("moving", 5 * piece))
            },
        }
    found["fits"] = {name: fits(device, *shape, rounds, block) for name, shape in shapes.items()}
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{'operator, ns':28}" + "".join(f"{mode:>9}" for mode in LEARNS) + "   idle+  awake+")
    for name, by_mode in found["operators"].items():
        more = [by_mode[mode] - by_mode["native"] for mode in ("idle", "awake")]
        costs = "".join(f"{by_mode[mode]:9.0f}" for mode in LEARNS)
        print(f"{name:28}{costs}" + "".join(f"{each:8.0f}" for each in more))
    for section in ("rates", "launches"):
        for name, figures in found[section].items():
            print(f"{section}, {name}: " + ", ".join(f"{key} {it:.1f}" for key, it in figures.items()))
    for name, row in found["fits"].items():
        print(
            f"fits, {name}: {row['managed_ms']:.2f} ms, native {row['native_ms']:.2f}, "
            f"{row['managed_ms'] / row['native_ms']:.3f}; idle after {row['idle_after_steps']} steps; "
            f"watched while timed {row['watched_while_timed']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, default=RESULTS / "operator_costs.json", metavar="FILE")
    parser.add_argument("--small", action="store_true", help="a rehearsal on emu")
    arguments = parser.parse_args()
    device = torch.device("emu" if arguments.small else "cuda")
    if arguments.small:
        torch_uvm.emulated.configure(memory="3GiB")
    else:
        check_room(LIMIT)
    guard = Guard(LIMIT).hold()
    torch_uvm.enable()
    found = {"environment": describe(sys.argv)} | ({} if arguments.small else device_description())
    found |= measure(device, arguments.small)
    guard.check()
    write_results(arguments.json, found)
    show(found)


if __name__ == "__main__":
    main()
