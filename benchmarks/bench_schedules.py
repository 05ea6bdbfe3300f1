"""Steps within a budget, predicted on any machine, beside their lower bound.

    python benchmarks/bench_schedules.py [--only TEXT] [--parts 1.5,2,4] [--refinements 0]

Each workload's traces (benchmarks/traces, timed on an H200 by record_traces.py) are played through the engine
and the allocator in modelled time: one with updates in place, one with deferred updates. The bound is
lower_bound.py's: for every policy, with updates whenever that is best. The budget is the peak in place /
PART. The durations of both traces are scaled to the step in core in place, and times are in multiples of it.
`ratio` is that of the faster prediction and the bound. `measured` is the newest step of the fastest kind on a
GPU (results/residency*.json), in multiples of the step in core of the same run. `planned` is what the
schedule itself predicts (docs/schedules.md), without fragments, for the faster kind. `cpu ms` is what the
policy takes to follow the whole trace and make its schedules.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lower_bound import bound

from torch_uvm._tools.schedules import scheduling_ms
from torch_uvm._tools.timed_iteration import iteration_of
from torch_uvm.schedules import predict, schedule_of
from torch_uvm.traces import Trace, read_trace

FOLDER = Path(__file__).resolve().parent
NEWEST_FIRST = ("_h200_shared", "_h200_traced", "_h100", "_schedules", "")
PLAYER = FOLDER.parent / "build" / "cpp" / "play_accesses"


def played_ms(trace: Path, budget: int, step_ms: float) -> float:
    """The mean of ten steps, after thirty or more, once the schedule is chosen. Steps are what the trace
    repeats, not what it marks.

    Raises:
        RuntimeError: it cannot be played under this budget.
    """
    operators = len(iteration_of(read_trace(trace), step_ms).floats)
    command = [str(PLAYER), str(trace), "--budget", str(budget), "--step-ms", str(step_ms)]
    command += ["--iteration", str(operators)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.splitlines()[-1].split()[-1])


def planned_ms(traces: Iterable[Trace], budget: int, step_ms: float) -> tuple[float, float] | None:
    """What the faster schedule predicts, and the CPU time of the policy; None: there is none."""
    found, took = [], []
    for trace in traces:
        try:
            found.append(predict(schedule_of(trace, budget, step_ms)).step_ms)
            took.append(scheduling_ms(trace, budget))
        except ValueError:  # an operator exceeds the budget
            continue
    return (min(found), statistics.mean(took)) if found else None


def measured(workload: str, part: float) -> float | None:
    """The newest step of the fastest kind at the peak / PART, over the one in core; None: not measured."""
    for name in NEWEST_FIRST:
        stored = json.loads((FOLDER / "results" / f"residency{name}.json").read_text())["rows"]
        rows = [row for row in stored if row["workload"] == workload and "step_ms" in row]
        steps = [row["step_ms"] for row in rows if row["planned_budget"] == f"1/{part:g}"]
        in_core = [row["step_ms"] for row in rows if row["column"] == "in core"]
        if steps and in_core:
            return float(min(steps) / in_core[0])
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted steps and their bounds.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--parts", default="1.5,2,4", help="of the peak")
    parser.add_argument("--refinements", type=int, default=0, help="of the bound: lower_bound.py")
    arguments = parser.parse_args()
    if not PLAYER.exists():
        parser.error(f"{PLAYER} is not there; make cpp builds it")
    parts = [float(part) for part in arguments.parts.split(",")]
    columns = "".join(
        f"{name:>10}"
        for name in ("in core", "in place", "deferred", "bound", "ratio", "measured", "planned", "cpu ms")
    )
    print(f"{'workload':40}{'part':>6}{columns}")
    ratios = []
    for workload, traces in json.loads((FOLDER / "traces" / "index.json").read_text()).items():
        if arguments.only in workload:
            ratios += rows(workload, traces, parts, arguments.refinements)
    if ratios:
        print(f"predicted / bound: mean {statistics.mean(ratios):.2f}, worst {max(ratios):.2f}")
    return 0


def rows(
    workload: str, traces: dict[str, dict[str, Any]], parts: Sequence[float], refinements: int
) -> list[float]:
    """Prints the workload's rows. Returns predicted / bound of each that has both."""
    ratios = []
    step_ms, peak = traces["in_place"]["step_ms"], traces["in_place"]["peak_bytes"]
    with tempfile.TemporaryDirectory() as folder:
        paths = {optimizer: Path(folder) / optimizer for optimizer in traces}
        for optimizer, path in paths.items():
            packed = FOLDER / "traces" / traces[optimizer]["file"]
            path.write_bytes(lzma.decompress(packed.read_bytes()))
        recorded = [read_trace(path) for path in paths.values()]
        for part in parts:
            budget = int(peak / part)
            print(f"{workload:40}{part:>6g}{step_ms:>10.1f}", end="", flush=True)
            predicted = []
            for path in paths.values():
                try:
                    predicted.append(played_ms(path, budget, step_ms))
                    print(f"{predicted[-1] / step_ms:>10.2f}", end="")
                except (RuntimeError, ValueError):
                    print(f"{'-':>10}", end="")
            if "deferred" not in paths:
                print(f"{'-':>10}", end="")
            try:
                least = bound(paths["in_place"], budget, step_ms, refinements=refinements)["bound_ms"]
                print(f"{least / step_ms:>10.2f}", end="")
                if predicted:
                    ratios.append(min(predicted) / least)
                    print(f"{ratios[-1]:>10.2f}", end="")
            except (RuntimeError, ValueError) as reason:
                print(f"  {reason}", end="")
            seen = measured(workload, part)
            print(f"{'-' if seen is None else format(seen, '.2f'):>10}", end="")
            if planned := planned_ms(recorded, budget, step_ms):
                print(f"{planned[0] / step_ms:>10.2f}{planned[1]:>10.0f}", end="")
            print(flush=True)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
