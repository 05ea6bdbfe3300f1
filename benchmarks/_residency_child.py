"""Runs one column of bench_residency.py in this process: `python _residency_child.py SPEC`.

Prints a line of JSON after the measured steps, and one after the extra measurements behind them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for determinism, before CUDA starts

import torch
from _residency_columns import COLUMNS, Column, Engine
from _runs import say
from _workloads import NotHere, make

MOST_SETTLING = 150  # steps: two trials of 68 by "auto", or 45 iterations, which may have two steps each
SETTLING = 5  # of them in a row
SAMPLED = 3  # steps after the measured ones, for the driver's figures
RECORDED = 8  # so that a loop of two steps has two iterations with the device's own times
TRANSFERS = ("fetched", "written_back", "used_in_place", "waited", "moved")
COUNTS = ("plan_hits", "plan_misses", "over_budget", "failures")
USUAL = "h200"  # the card of predictions where it is not known, as in rehearsals


class Training:
    """Runs a workload under a column, step by step."""

    def __init__(self, column: Column, name: str, device: torch.device, small: bool) -> None:
        self.column, self.device = column, device
        self.workload = make(name, device, small)
        column.adapt(self.workload)
        self.optimizer = column.make_optimizer(self.workload)
        self.losses: list[torch.Tensor] = []

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A timestamp: on the device, or of the host where kernels run synchronously."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self) -> tuple[Any, Any]:
        begin = self.mark()
        with self.column.forward():
            loss = self.workload.loss(self.workload.model, self.workload.batch)
        if loss.requires_grad:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())
        return begin, self.mark()

    def alone(self) -> float:
        """Milliseconds of a step between two synchronisations, by the host's clock."""
        self.wait()
        begin = time.perf_counter()
        self.step()
        self.wait()
        return (time.perf_counter() - begin) * 1e3

    def steady(self, count: int) -> list[float]:
        """Milliseconds of steps without synchronisation between them, as a script runs them."""
        marks = [self.step() for _ in range(count)]
        self.wait()
        on_device = self.device.type == "cuda"
        return [begin.elapsed_time(end) if on_device else (end - begin) * 1e3 for begin, end in marks]

    def settle(self, most: int) -> int:
        """Runs steps until the column is settled, about `most` of them. Returns their number.

        They run in a row, like the measured ones: a schedule that is the fastest with a
        synchronisation after each step need not be so without.
        """
        steps = 0
        while not self.column.is_settled() and steps < most:
            steps += len(self.steady(SETTLING))
        return steps

    def measure(self, count: int) -> dict[str, Any]:
        """The median of steps, and how much they differ, as a part of it."""
        took = self.steady(count)
        middle = statistics.median(took)
        return {"step_ms": middle, "spread": (max(took) - min(took)) / middle}

    def results(self) -> tuple[list[str], str]:
        """All losses, and a digest of all bits of the parameters."""
        bits = hashlib.sha256()
        for parameter in self.workload.model.parameters():
            bits.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return self.losses_hex(), bits.hexdigest()

    def losses_hex(self) -> list[str]:
        return [float(loss.item()).hex() for loss in self.losses]


def difference(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, Any]:
    """The engine's statistics per step."""

    def of(name: str) -> Iterator[tuple[str, float]]:
        for key, value in after[name].items():
            yield key, (value - before[name][key]) / steps

    if not after:
        return {}
    counts = {name: (after[name] - before[name]) / steps for name in COUNTS}
    return {name: dict(of(name)) for name in TRANSFERS} | counts


def train(spec: dict[str, Any], device: torch.device) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Determinism fills new memory, which costs time and which a script that wants fast steps does not
    # request.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    column = COLUMNS[spec["column"]](device, spec["budget"], spec["trace"])
    column.start()
    training = Training(column, spec["workload"], device, spec["small"])
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    say("made")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found: dict[str, Any] = {"first_ms": training.alone()}
    found["not_deterministic"] = any("deterministic" in str(it.message) for it in warned)
    for _ in range(spec["warm_up"] - 1):
        training.alone()
    training.steady(column.settles)
    settling = training.settle(SETTLING if spec["small"] else MOST_SETTLING)
    found |= {"warm_up_steps": spec["warm_up"] + column.settles + settling, "settled": column.is_settled()}
    before = column.statistics()
    found |= training.measure(spec["steps"]) | {"steps": spec["steps"]}
    found["statistics"] = difference(before, column.statistics(), spec["steps"])
    found["losses"] = training.losses_hex()
    training.steady(SAMPLED)
    if device.type == "cuda":
        found["max_allocated"] = torch.cuda.max_memory_allocated()
        found["max_reserved"] = torch.cuda.max_memory_reserved()
    say("row", **found, native_reserved=column.native_reserved())
    if spec["predict"]:
        say("extra", predicted=predict(spec, training))
    if spec["repeat"]:
        say("extra", repeatable=repeats(spec, training))
    training.column.finish()


def repeats(spec: dict[str, Any], training: Training) -> bool:
    """Whether a plain run with the same seeds at other addresses has the same losses and parameters. A loss
    of bfloat16 has eight bits: it may be equal for many steps while parameters differ."""
    first = training.results()
    del training.workload, training.optimizer
    gc.collect()
    again = Training(Column(training.device, None, None), spec["workload"], training.device, spec["small"])
    for _ in first[0]:
        again.step()
    return again.results() == first


def predict(spec: dict[str, Any], training: Training) -> dict[str, Any]:
    """What `python -m torch_uvm plan` says of the budget, from a trace that this process records once
    everything fits. `step_ms` is None, and `note` says why, if there is no prediction."""
    from torch_uvm._tools.cards import card_names, load_card
    from torch_uvm._tools.plans import DEFERRED, IN_PLACE, Loop
    from torch_uvm.traces import read_trace

    column = training.column
    assert isinstance(column, Engine)
    column.lift_budget()
    training.steady(spec["warm_up"])
    found = {"in_core_ms": training.measure(spec["steps"])["step_ms"]}
    before = column.statistics()
    with column.record(spec["trace"]):
        for _ in range(RECORDED):
            training.alone()  # its optimizer marks the end of the step
    if difference(before, column.statistics(), 1)["fetched"]["bytes"]:
        return {"note": "not everything fits when the budget is lifted"}
    name = torch.cuda.get_device_name().lower() if training.device.type == "cuda" else USUAL
    card = next((card for card in card_names() if card in name.replace(" ", "")), USUAL)
    try:
        loop = Loop(read_trace(Path(spec["trace"])), load_card(card))
    except ValueError as error:  # no iteration repeats
        return found | {"step_ms": None, "note": str(error)}
    point = loop.point(spec["budget"], DEFERRED if column.optimizer == "deferred" else IN_PLACE)
    return found | {"step_ms": point.step_ms, "traced_ms": loop.in_core_ms, "note": point.note}


def main() -> None:
    spec = json.loads(sys.argv[1])
    if spec["device"] == "emu":
        __import__("torch_uvm")  # registers the device
    try:
        train(spec, torch.device(spec["device"]))
    except NotHere as reason:
        say("extra", not_run=str(reason))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # results are printed; freeing gigabytes of pinned memory takes seconds


if __name__ == "__main__":
    main()
