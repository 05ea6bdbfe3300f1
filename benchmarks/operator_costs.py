"""What the engine costs the host: operators, steps that fit the budget, and the driver calls of transfers.

    python benchmarks/operator_costs.py --out DIRECTORY

In one process, so that ratios compare the same host: "native" is PyTorch's own memory, "off" managed memory
without a budget, "idle" a budget that everything fits into, "awake" a budget that cold memory exceeds, where
nothing of the step has to move. They alternate, and the least time counts: other load only adds time. At most
4 GiB are managed, and a GPU must have sixteen times that free. `--small` rehearses it on `emu`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCH_UVM_CONF"] = "limit:4GiB"  # before torch_uvm is imported

import torch
import torch.nn.functional as F
from _environment import describe
from _residency_calls import seconds, synchronise
from _residency_workloads import TransformerOf, Workload

import torch_uvm

GIB = 1 << 30
MIB = 1 << 20
LIMIT = 4 * GIB
LIVE = 64 * 1024  # floats: 256 KiB, the smallest storage that the engine moves
TENSORS = 50
IDLE_AFTER = 40  # steps; then a program that fits has long been idle

Call = Callable[[], object]


# --- operators

Step = Callable[[list[torch.Tensor], int], object]


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
        for mode in ("native", *budgets):
            torch_uvm.set_budget(budgets.get(mode), device)
            used = plain if mode == "native" else tensors
            learns = {"native": 2, "off": 2, "idle": IDLE_AFTER, "awake": 8}[mode]
            for name, step in CASES.items():
                with torch_uvm.disabled() if mode == "native" else torch_uvm.enabled():
                    times = [
                        seconds(device, functools.partial(step, used, count)) for _ in range(learns + 10)
                    ]
                least = min(times[learns:]) / count * 1e9
                found[name][mode] = min(least, found[name].get(mode, least))
    torch_uvm.set_budget(None, device)
    del cold
    return found


# --- the driver calls of a transfer


def calls_in(profiled: torch.profiler.profile, trace: Path) -> Counter[str]:
    """The driver calls of a profile, by name, without the launches of kernels. Leaves its trace there."""
    profiled.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    names = (event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    return Counter(name for name in names if "Launch" not in name)


def driver_calls(device: torch.device, piece: int, out: Path) -> dict[str, Any]:
    """Calls of a loop over twice as many storages as the budget holds, per transfer."""
    pieces = 128
    found: dict[str, Any] = {}
    kind = "CUDA" if device.type == "cuda" else "CPU"  # a rehearsal finds no calls
    for name, writes in (("read: fetch, drop", False), ("written: fetch, write-back", True)):
        torch_uvm.set_budget(pieces * piece // 2, device)
        tensors = [torch.ones(piece // 4, device=device) for _ in range(pieces)]
        into = torch.empty(1, device=device)

        def step(
            tensors: list[torch.Tensor] = tensors, into: torch.Tensor = into, writes: bool = writes
        ) -> None:
            for tensor in tensors:
                if writes:
                    tensor.add_(1)
                else:
                    torch.sum(tensor, 0, keepdim=True, out=into)

        for _ in range(10):
            seconds(device, step)
        before = torch_uvm.residency_stats()
        with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profiled:
            for _ in range(5):
                step()
            synchronise(device)
        after = torch_uvm.residency_stats()
        calls = calls_in(profiled, out / f"calls_{'written' if writes else 'read'}.json")
        moved = {key: after[key]["count"] - before[key]["count"] for key in ("fetched", "written_back")}
        moved["dropped"] = after["dropped_clean"]["count"] - before["dropped_clean"]["count"]
        transfers = max(moved["fetched"] + moved["written_back"], 1)
        found[name] = moved | {
            "calls": {key: round(count / transfers, 2) for key, count in calls.most_common(12)},
            "per_transfer": round(sum(calls.values()) / transfers, 2),
        }
        del tensors, step
        torch_uvm.set_budget(None, device)
    return found


# --- steps that fit


class Training:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.optimizer = workload.optimizer(workload.trained())

    def step(self) -> None:
        self.workload.loss(self.workload.model, self.workload.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def fits(device: torch.device, shape: TransformerOf, budget: int, rounds: int, block: int) -> dict[str, Any]:
    """Milliseconds of a step, natively and within a budget that it fits, and when the engine became idle."""

    def made() -> Training:
        with device:
            return Training(shape.make(device))

    with torch_uvm.disabled():
        native = made()
        native.steps(5)
    torch_uvm.set_budget(budget, device)
    managed = made()
    watched, idle_after = -1, None
    first: list[float] = []
    for number in range(IDLE_AFTER):
        first.append(seconds(device, managed.step) * 1e3)
        stats = torch_uvm.residency_stats()
        seen = stats["plan_hits"] + stats["plan_misses"]
        if seen == watched and idle_after is None:
            idle_after = number
        elif seen != watched:
            idle_after = None
        watched = seen
    times: dict[str, list[float]] = {"native": [], "managed": []}
    for _ in range(rounds):
        with torch_uvm.disabled():
            times["native"].append(seconds(device, functools.partial(native.steps, block)) / block * 1e3)
        times["managed"].append(seconds(device, functools.partial(managed.steps, block)) / block * 1e3)
    stats = torch_uvm.residency_stats()
    peak = torch_uvm.memory_stats(device)["allocated_bytes.all.peak"]
    found = {
        "budget_over_peak": budget / max(peak, 1),
        "idle_after_steps": idle_after,
        "watched_while_timed": stats["plan_hits"] + stats["plan_misses"] - watched,
        "first_ms": first[:8],
        "native_ms": min(times["native"]),
        "managed_ms": min(times["managed"]),
        "native_median_ms": statistics.median(times["native"]),
        "managed_median_ms": statistics.median(times["managed"]),
        "all": times,
    }
    del managed, native
    torch_uvm.set_budget(None, device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the figures")
    parser.add_argument("--small", action="store_true", help="a rehearsal on emu")
    arguments = parser.parse_args()
    small: bool = arguments.small
    device = torch.device("emu" if small else "cuda")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from _gpu_guard import Guard, check_room

    if small:
        torch_uvm.emulated.configure(memory="3GiB")
    if device.type == "cuda":
        check_room(LIMIT)
    guard = Guard(LIMIT).hold()
    torch_uvm.enable()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"environment": describe(sys.argv)}
    with torch.no_grad():
        found["operators"] = operators(device, 1 if small else 3, 100 if small else 1000)
        found["driver_calls"] = driver_calls(device, MIB // 4 if small else 4 * MIB, arguments.out)
    shapes = {
        "12 blocks of 512, 512 tokens": (TransformerOf(1, 512, width=512, heads=8), GIB),
        "6 blocks of 2048, 2 048 tokens": (TransformerOf(2, 1024, depth=6), 7 * GIB // 2),
    }
    if small:
        shapes = {"small": (TransformerOf(1, 16, depth=2, width=256, heads=2, dtype=torch.float32), GIB)}
    rounds, block = (2, 5) if small else (10, 20)
    found["fits"] = {
        name: fits(device, shape, budget, rounds, block) for name, (shape, budget) in shapes.items()
    }
    guard.check()
    (arguments.out / "operator_costs.json").write_text(json.dumps(found, indent=1))

    modes = ("native", "off", "idle", "awake")
    print(f"{'operator, ns':28}" + "".join(f"{mode:>9}" for mode in modes) + "   idle+  awake+")
    for name, by_mode in found["operators"].items():
        more = [by_mode[mode] - by_mode["native"] for mode in ("idle", "awake")]
        print(
            f"{name:28}" + "".join(f"{by_mode[m]:9.0f}" for m in modes) + "".join(f"{m:8.0f}" for m in more)
        )
    for name, calls in found["driver_calls"].items():
        print(f"{name}: {calls['per_transfer']} driver calls a transfer: {calls['calls']}")
    for name, row in found["fits"].items():
        ratio = row["managed_ms"] / row["native_ms"]
        print(
            f"fits, {name}: {row['managed_ms']:.2f} ms, native {row['native_ms']:.2f}, {ratio:.3f} "
            f"(medians {row['managed_median_ms']:.2f}, {row['native_median_ms']:.2f}); "
            f"idle after {row['idle_after_steps']} steps; watched while timed {row['watched_while_timed']}"
        )


if __name__ == "__main__":
    main()
