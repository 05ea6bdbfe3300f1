"""Runs one column of bench_residency.py in this process.

Imports torch, then waits for a line of JSON on standard input that selects the column, so that several
processes can import concurrently before the measurement. Writes its results so far to a file after every
stage.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for determinism, before CUDA starts

import torch
from _host_speed import HostSpeed
from _residency_columns import COLUMNS, Column, Engine
from _residency_workloads import NotHere, Workload, larger
from _workloads import make

SPIKE = 4  # multiple of the usual batch size
MOST_SETTLING = 150  # steps: two trials of 68 by "auto", or 45 iterations, which may have two steps each
SETTLING = 5  # of them in a row
CALM_GROUPS = 2  # of steps, measured while the host is at full speed
PARTS = {"step_ms": (0, 3), "forward_ms": (0, 1), "backward_ms": (1, 2), "optimizer_ms": (2, 3)}
SAMPLED = 3  # steps after the measured ones, for the driver's figures
RECORDED = 4  # recorded steps; the lower bound uses the middle ones
RECORDINGS = 4  # at most, until the host is at full speed during one
RECORDED_IN_CORE = 8  # so that a loop of two steps has two iterations with the device's own times


class CudaMarks:
    """Timestamps on the device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))

    def wait(self) -> None:
        torch.cuda.synchronize()


class HostMarks:
    """Timestamps for a device whose kernels run synchronously."""

    def mark(self) -> float:
        return time.perf_counter()

    def ms(self, begin: Any, end: Any) -> float:
        return float(end - begin) * 1e3

    def wait(self) -> None:
        return


class Report:
    """The file of results, and the timestamps that the sampler in the parent process needs."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.found: dict[str, Any] = {"moments": {}}

    def moment(self, name: str) -> None:
        self.found["moments"][name] = time.monotonic()
        self.write()

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found))
        part.replace(self.path)  # atomic: a reader never sees a partial file


class Training:
    """Runs a workload under a column, step by step."""

    def __init__(self, column: Column, workload: Workload, device: torch.device) -> None:
        self.column, self.workload = column, workload
        column.adapt(workload)
        self.optimizer = column.make_optimizer(workload)
        self.marks = CudaMarks() if device.type == "cuda" else HostMarks()
        self.losses: list[torch.Tensor] = []

    def step(self, batch: tuple[torch.Tensor, ...] | None = None) -> list[Any]:
        """The timestamps of a step: begin, end of forward, end of backward, end of step."""
        found = [self.marks.mark()]
        with self.column.forward():
            loss = self.workload.loss(self.workload.model, self.workload.batch if batch is None else batch)
        found.append(self.marks.mark())
        if loss.requires_grad:
            loss.backward()
        found.append(self.marks.mark())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())
        return [*found, self.marks.mark()]

    def alone(self, batch: tuple[torch.Tensor, ...] | None = None) -> float:
        """Milliseconds of a step between two synchronisations, by the host's clock."""
        self.column.before_step(self.workload, self.optimizer)
        self.marks.wait()
        begin = time.perf_counter()
        self.step(batch)
        self.marks.wait()
        return (time.perf_counter() - begin) * 1e3

    def settle(self, most: int = MOST_SETTLING) -> list[float]:
        """Runs steps until the column is settled, about `most` of them. Returns their milliseconds.

        They run in a row, like the measured ones: a schedule that is the fastest with a
        synchronisation after each step need not be so without.
        """
        took: list[float] = []
        while not self.column.is_settled() and len(took) < most:
            took += [step["step_ms"] for step in self.steady(SETTLING)]
        return took

    def steady(self, count: int) -> list[dict[str, float]]:
        """Runs steps as a script does: without synchronisation between them, unless the column needs it.
        Returns the milliseconds of each, and of its parts."""
        marked: list[list[Any]] = []
        wall: list[float] = []
        self.marks.wait()
        begin = time.perf_counter()
        for _ in range(count):
            if not self.column.back_to_back:
                self.column.before_step(self.workload, self.optimizer)
                self.marks.wait()
                alone = time.perf_counter()
            marked.append(self.step())
            if not self.column.back_to_back:
                self.marks.wait()
                wall.append((time.perf_counter() - alone) * 1e3)
        self.marks.wait()
        mean = (time.perf_counter() - begin) * 1e3 / count

        def took(number: int, name: str) -> float:
            first, last = PARTS[name]
            return self.marks.ms(marked[number][first], marked[number][last])

        return [
            {name: took(number, name) for name in PARTS} | {"wall_ms": wall[number] if wall else mean}
            for number in range(count)
        ]

    def measure(self, count: int, host: HostSpeed, seconds: float) -> dict[str, Any]:
        """Runs groups of `count` steps until enough of them ran while the host was at full speed, or for so
        many seconds. Returns the medians of these groups; of all, if there is none."""
        calm: list[list[dict[str, float]]] = []
        others: list[list[dict[str, float]]] = []
        begin = time.perf_counter()
        while True:
            with host.watch() as watched:
                group = self.steady(count)
            (calm if watched.calm else others).append(group)
            if len(calm) == CALM_GROUPS or time.perf_counter() - begin >= seconds:
                break
        steps = [step for group in calm or others for step in group]
        return {
            **{name: statistics.median(step[name] for step in steps) for name in (*PARTS, "wall_ms")},
            "steps_ms": [step["step_ms"] for step in steps],
            "steps": count * (len(calm) + len(others)),
            "calm": len(calm) / (len(calm) + len(others)),
        }

    def losses_hex(self) -> list[str]:
        return [float(loss.item()).hex() for loss in self.losses]


def difference(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, Any]:
    """The engine's statistics per step. Levels, such as bytes in use, are the values after the step."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, dict) and "bytes" in value:
            found[name] = {key: (value[key] - before[name][key]) / steps for key in value}
        elif name in ("plan_hits", "plan_misses", "over_budget", "failures"):
            found[name] = (value - before[name]) / steps
        else:
            found[name] = value
    return found


def digest(model: torch.nn.Module) -> str:
    """Of all bits of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def allocator_peaks(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
    }


def warm_context(device: torch.device) -> None:
    """Creates the context before device memory is measured."""
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.synchronize()


def device_of(spec: dict[str, Any]) -> torch.device:
    if spec["device"] == "emu":
        importlib.import_module("torch_uvm")  # registers the device
    return torch.device(spec["device"])


def train(spec: dict[str, Any], report: Report) -> None:
    device = device_of(spec)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Determinism fills new memory, which costs time and which a script that wants fast steps does not
    # request.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warm_context(device)
    report.moment("context")
    column = COLUMNS[spec["column"]](device, spec["budget"], spec["trace"])
    column.start()
    training = Training(column, make(spec["workload"], device, spec["small"]), device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    report.found["setup_statistics"] = column.statistics()
    report.moment("made")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warm_up = [training.alone()]
    report.found["not_deterministic"] = any("deterministic" in str(it.message) for it in warned)
    report.found["first_ms"] = warm_up[0]
    report.moment("first step")
    warm_up += [training.alone() for _ in range(spec["warm_up"] - 1)]
    if column.settles:
        training.steady(column.settles)
    warm_up += training.settle(SETTLING if spec["small"] else MOST_SETTLING)
    report.found["warm_up_ms"] = warm_up
    report.found["settled"] = column.is_settled()
    before = column.statistics()
    if before:
        found = report.found["setup_statistics"]
        report.found["warm_up_statistics"] = difference(found, before, len(warm_up) + column.settles)
    report.moment("warm")
    host = HostSpeed()
    quiet = Path(spec["quiet"])
    quiet.touch()  # no samples of the driver's memory meanwhile
    report.found |= training.measure(spec["steps"], host, spec["seconds"])
    quiet.unlink()
    report.moment("done")
    report.found["statistics"] = difference(before, column.statistics(), report.found["steps"])
    report.found["losses"] = training.losses_hex()
    training.steady(SAMPLED)
    report.moment("sampled")
    report.found |= allocator_peaks(device)
    report.found["native_reserved"] = column.native_reserved()
    report.write()
    extras(spec, report, training, host)
    column.finish()


def extras(spec: dict[str, Any], report: Report, training: Training, host: HostSpeed) -> None:
    """The measurements besides the timed steps. They do not affect the figures above."""
    device = torch.device(spec["device"])
    if spec["spike"]:
        batch = larger(spec["workload"], SPIKE, device, spec["small"])
        report.found["spike_ms"] = training.alone(batch)
        report.found["after_spike_ms"] = [training.alone() for _ in range(spec["warm_up"])]
        report.found["after_spike"] = training.measure(spec["steps"], host, spec["seconds"])
        report.moment("spike done")
    recording = training.column.recording()
    if recording is not None:
        with recording:
            for _ in range(RECORDED):
                training.alone()  # its optimizer marks the end of the step
        report.found["trace"] = spec["trace"]
        report.write()
    if spec["predict"]:
        report.found["predicted"] = predict(spec, training, host)
        report.write()
    if spec["repeat"]:
        # Repeats a plain run with the same seeds at other addresses, to see whether it is reproducible. A
        # loss of bfloat16 has eight bits: it may be equal for many steps while parameters differ.
        first = training.losses_hex(), digest(training.workload.model)
        column, training.column = training.column, Column(device, None, None)
        del training.workload, training.optimizer
        gc.collect()
        again = Training(column, make(spec["workload"], device, spec["small"]), device)
        for _ in first[0]:
            again.step()
        report.found["repeatable"] = (again.losses_hex(), digest(again.workload.model)) == first
        report.write()


def predict(spec: dict[str, Any], training: Training, host: HostSpeed) -> dict[str, Any]:
    """What a plan says of the budget, from a trace that this process records once everything fits."""
    from _residency_prediction import predicted  # imports torch_uvm

    column = training.column
    assert isinstance(column, Engine)
    column.lift_budget()
    training.steady(spec["warm_up"])
    in_core = training.measure(spec["steps"], host, spec["seconds"])
    before = column.statistics()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        for _ in range(RECORDINGS):
            with host.watch() as watched, column.record(str(trace)):
                for _ in range(RECORDED_IN_CORE):
                    training.alone()
            if watched.calm:
                break
        if difference(before, column.statistics(), 1)["fetched"]["bytes"]:
            return {"note": "not everything fits when the budget is lifted"}
        found = predicted(trace, training.workload.batch[0].device, spec["budget"], column.optimizer)
    return {"in_core_ms": in_core["step_ms"], "calm": in_core["calm"], "trace_calm": watched.calm} | found


def main() -> None:
    Path(sys.argv[1]).touch()  # signals that all imports are done
    line = sys.stdin.readline()
    if not line.strip():
        return  # the parent does not need this process
    spec = json.loads(line)
    report = Report(spec["report"])
    report.moment("begin")
    try:
        if spec["kind"] == "train":
            train(spec, report)
        else:
            from _residency_calls import measure

            measure(spec, device_of(spec), report)
    except NotHere as reason:
        report.found["not_run"] = str(reason)
    except Exception as error:
        report.found["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        report.moment("end")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # results are written; freeing gigabytes of pinned memory takes seconds


if __name__ == "__main__":
    main()
