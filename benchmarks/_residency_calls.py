"""Costs of the residency engine outside of training: copy rates, launches beside copies, and operators."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from _residency_columns import Engine, InCore, bindings
from _residency_limits import GIB

MIB = 1024**2
Call = Callable[[], object]


class Sizes:
    """Sizes for a GPU, or small ones for a rehearsal."""

    def __init__(self, small: bool) -> None:
        self.moved = 8 * MIB if small else GIB
        self.pieces = 4 if small else 32
        self.budget = self.moved + self.moved // 4
        self.launches = 2_000 if small else 100_000
        self.piece = self.moved // 4
        # floats: 256 KiB, the smallest storage that the engine moves
        self.live = 4096 if small else 64 * 1024
        self.cold = 8 * MIB if small else GIB // 2
        self.shapes = [(10, 100), (10, 1000)] if small else list(SHAPES)


FITS = 6 * GIB  # larger than the sum of the operators' storages
ROUNDS = 2
# Numbers of live storages, and operators per step.
SHAPES = [(100, 1_000), (1_000, 1_000), (10_000, 1_000), (100, 10_000), (10_000, 10_000), (10_000, 100_000)]


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(device: torch.device, call: Call) -> float:
    synchronise(device)
    begin = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - begin


# --- rates


def rates(device: torch.device, engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """Writes back and then fetches 1 GiB: GB/s by the host's clock and by the engine's events."""
    rows = {}
    for pieces in (1, sizes.pieces):
        out, back = [], []
        counted: dict[str, list[float]] = {"written_back": [], "fetched": []}
        for _ in range(5):
            moved = [torch.ones(sizes.moved // 4 // pieces, device=device) for _ in range(pieces)]
            synchronise(device)
            before = engine.statistics()
            room: list[torch.Tensor] = []

            def push(room: list[torch.Tensor] = room, pieces: int = pieces) -> None:
                # This allocation evicts the storages. They are dirty, so they are written back.
                for _ in range(pieces):
                    room.append(torch.empty(sizes.moved // 4 // pieces, device=device))
                    room[-1].fill_(1)

            took = seconds(device, push)
            between = engine.statistics()
            del push
            room.clear()

            def pull(moved: list[torch.Tensor] = moved) -> None:
                bindings().keep_resident(moved, True)

            took_back = seconds(device, pull)
            after = engine.statistics()
            bindings().keep_resident(moved, False)
            del pull
            written = between["written_back"]["bytes"] - before["written_back"]["bytes"]
            fetched = after["fetched"]["bytes"] - between["fetched"]["bytes"]
            out.append((written, took))
            back.append((fetched, took_back))
            for name, first, last in (("written_back", before, between), ("fetched", between, after)):
                ms, count = last[name]["ms"] - first[name]["ms"], last[name]["bytes"] - first[name]["bytes"]
                if ms > 0:
                    counted[name].append(count / ms / 1e6)
            del moved
        for name, found in (("written_back", out), ("fetched", back)):
            rows[f"{name}, {pieces} piece{'s' if pieces > 1 else ''}"] = {
                "bytes": statistics.median(count for count, _ in found),
                "wall_gb_per_s": statistics.median(count / took / 1e9 for count, took in found),
                "events_gb_per_s": statistics.median(counted[name]) if counted[name] else None,
            }
    return rows


# --- launches beside it


def launches(device: torch.device, engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """Microseconds per launch of a small kernel while tensors of another thread are evicted and fetched, and
    in the same program without the engine."""
    sys.setswitchinterval(20e-6)  # the default of 5 ms would dominate the measurement
    without = beside(device, sizes)
    set_budget_of(device)(sizes.budget)
    before = engine.statistics()
    moving = beside(device, sizes)
    moved = engine.statistics()["fetched"]["bytes"] - before["fetched"]["bytes"]
    return {"without": without, "moving": moving, "fetched_bytes": moved}


def beside(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """The other thread cycles through tensors of 1.5 times the budget."""
    tensors = [torch.ones(sizes.piece // 4, device=device) for _ in range(8)]
    small = torch.ones(64, device=device)
    stream = torch.Stream(device)
    synchronise(device)
    stop = threading.Event()
    rounds = [0]

    def go_around() -> None:
        while not stop.is_set():
            for tensor in tensors:
                tensor.add_(1)
            synchronise(device)
            rounds[0] += 1

    other = threading.Thread(target=go_around)
    other.start()
    times = []
    try:
        while rounds[0] < 3:
            time.sleep(0.01)
        with stream:
            for number in range(sizes.launches):
                begin = time.perf_counter_ns()
                small.add_(1)
                times.append(time.perf_counter_ns() - begin)
                if number % 200 == 199:
                    stream.synchronize()  # a full launch queue blocks, with and without the engine
    finally:
        stop.set()
        other.join()
    times.sort()

    def at(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))] / 1e3

    return {"p50_us": at(0.5), "p99_us": at(0.99), "p99.9_us": at(0.999), "worst_us": times[-1] / 1e3}


# --- operators


def operators(
    device: torch.device, sizes: Sizes, set_budget: Callable[[int | None], None] | None
) -> list[dict[str, Any]]:
    """Nanoseconds per operator in a step of small operators. Half are in place, half make a temporary.

    off: without the engine. asleep: with a budget that everything fits into. awake: with a budget that is
    exceeded by cold memory; no storage of the step has to move. The three alternate, and the minimum counts:
    other load on the machine only ever adds time, and more than the difference that is measured.
    """
    rows = []
    for live, count in sizes.shapes:
        cold = [torch.ones(sizes.cold // 8 // 4, device=device) for _ in range(8)]
        tensors = [torch.ones(sizes.live, device=device) for _ in range(live)]

        def step(tensors: list[torch.Tensor] = tensors, live: int = live, count: int = count) -> None:
            for number in range(0, count, 2):
                tensors[number % live].add_(1)
                tensors[(number + 1) % live] + 1

        def measure(warm_up: int, step: Call = step, count: int = count) -> float:
            for _ in range(max(warm_up, 4_000 // count)):
                step()
            return min(seconds(device, step) for _ in range(max(2, 10_000 // count))) / count * 1e9

        least: dict[str, float] = {}
        budgets = {"off": None, "asleep": FITS, "awake": live * sizes.live * 4 + sizes.cold // 2}
        fetched = 0
        for _ in range(ROUNDS if set_budget is not None else 1):
            for name, budget in budgets.items() if set_budget is not None else [("off", None)]:
                if set_budget is not None:
                    set_budget(budget)
                learns = 1 if budget is None else 6  # steps until the schedule matches
                found = measure(learns)
                least[name] = min(found, least.get(name, found))
                if name == "awake":
                    fetched = bindings().residency_stats()["fetched"]["bytes"]
                    step()
                    fetched = bindings().residency_stats()["fetched"]["bytes"] - fetched
        if set_budget is not None:
            set_budget(None)
        row: dict[str, Any] = {"live": live, "operators": count}
        row |= {f"{name}_ns": value for name, value in least.items()}
        if "awake" in least:
            row |= {
                "cost_ns": least["awake"] - least["off"],
                "asleep_cost_ns": least["asleep"] - least["off"],
            }
            row["fetched_bytes"] = fetched  # per step, when awake; should be 0
        rows.append(row)
        del tensors, cold, step, measure  # free these before making those of the next shape
    return rows


def measure(spec: dict[str, Any], device: torch.device, report: Any) -> None:
    sizes = Sizes(spec["small"])
    if spec["column"] == "in core":
        InCore(device, None, None).start()
        with torch.no_grad():
            report.found["figures"] = operators(device, sizes, None)
        return
    what = spec["workload"]
    budget = sizes.budget if what == "rates" else None  # the other measurements set it alternately
    engine = Engine(device, budget, None)
    engine.start()
    with torch.no_grad():
        if what == "rates":
            report.found["figures"] = rates(device, engine, sizes)
        elif what == "launches":
            report.found["figures"] = launches(device, engine, sizes)
        else:
            report.found["figures"] = operators(device, sizes, set_budget_of(device))
    engine.finish()


def set_budget_of(device: torch.device) -> Callable[[int | None], None]:
    import torch_uvm  # columns without torch_uvm must not import it

    return lambda budget: torch_uvm.set_budget(budget, device)
