"""Steps within a budget, predicted on any machine, beside their lower bound.

    python benchmarks/bench_schedules.py [--only TEXT] [--parts 1.5,2,4]

Each workload's traces (benchmarks/traces, timed on an H200 by record_traces.py) are played through the engine
and the allocator in modelled time: one with updates in place, one with deferred updates. The bound is
lower_bound.py's: for every policy, with updates whenever that is best. The budget is the peak in place /
PART. The durations of both traces are scaled to the step in core in place, and times are in multiples of it.
`ratio` is that of the faster prediction and the bound. `measured` is the newest step of the fastest kind on a
GPU (results/residency*.json), in multiples of the step in core of the same run. `planned` is what the
schedule itself predicts (docs/plan.md), without fragments, for the faster kind. `in room` is the bound
within the room that schedules have: the budget without staging and the reserve. `cpu ms` is what the policy
takes to follow the whole trace and make its schedules.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lower_bound import bound

from torch_uvm._tools.cards import H200
from torch_uvm._tools.schedules import TracedLoop
from torch_uvm._tools.timed_iteration import iteration_of
from torch_uvm.traces import Trace, read_trace

FOLDER = Path(__file__).resolve().parent
NEWEST_FIRST = ("_h200_goals", "_h100_goals", "_h100", "")
PLAYER = FOLDER.parent / "build" / "cpp" / "play_accesses"
COLUMNS = ("in place", "deferred", "bound", "ratio", "measured", "planned", "in room")


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


class Planned(NamedTuple):
    """What the faster schedule predicts, the bytes that it has, and the CPU time of the policy."""

    ms: float
    capacity: int
    cpu_ms: float


def planned(traces: Iterable[Trace], budget: int, step_ms: float) -> Planned | None:
    """None: an operator exceeds the budget."""
    found, took = [], []
    for trace in traces:
        try:
            predicted = TracedLoop(trace, step_ms).predicted(budget, 0.0, H200)
            if predicted.ms < math.inf:
                found.append((predicted.ms, predicted.capacity))
                took.append(scheduling_ms(trace, budget))
        except ValueError:
            continue
    return Planned(*min(found), statistics.mean(took)) if found else None


def scheduling_ms(trace: Trace, budget: int) -> float:
    """The CPU time of a policy that follows the trace and makes its schedules, from a trace in memory."""
    begin = time.process_time()
    TracedLoop(trace).predicted(budget, 0.0, H200)
    return (time.process_time() - begin) * 1e3


def measured(workload: str, part: float) -> float | None:
    """The newest step of the fastest kind at the peak / PART, over the one in core; None: not measured."""
    for name in NEWEST_FIRST:
        rows = json.loads((FOLDER / "results" / f"residency{name}.json").read_text())["rows"]
        wanted = (workload, f"1/{part:g}")
        ours = [row for row in rows if (row["workload"], row["planned_budget"]) == wanted]
        if steps := [float(row["over_in_core"]) for row in ours if "over_in_core" in row]:
            return min(steps)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted steps and their bounds.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--parts", default="1.5,2,4", help="of the peak")
    arguments = parser.parse_args()
    if not PLAYER.exists():
        parser.error(f"{PLAYER} is not there; make cpp builds it")
    parts = [float(part) for part in arguments.parts.split(",")]
    print(f"{'workload':40}{'part':>6}" + "".join(f"{name:>10}" for name in ("in core", *COLUMNS, "cpu ms")))
    found = [
        pair
        for workload, traces in json.loads((FOLDER / "traces" / "index.json").read_text()).items()
        if arguments.only in workload
        for pair in rows(workload, traces, parts)
    ]
    for at, name in enumerate(("predicted / bound", "planned / in room")):
        if each := [pair[at] for pair in found]:
            print(f"{name}: mean {statistics.mean(each):.2f}, worst {max(each):.2f}")
    return 0


def rows(
    workload: str, traces: dict[str, dict[str, Any]], parts: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """Prints the workload's rows. Yields predicted / bound and planned / in room of each that has a bound."""
    step_ms, peak = traces["in_place"]["step_ms"], traces["in_place"]["peak_bytes"]
    with tempfile.TemporaryDirectory() as folder:
        paths = {optimizer: Path(folder) / optimizer for optimizer in traces}
        for optimizer, path in paths.items():
            packed = FOLDER / "traces" / traces[optimizer]["file"]
            path.write_bytes(lzma.decompress(packed.read_bytes()))
        recorded = [read_trace(path) for path in paths.values()]
        for part in parts:
            budget, found = int(peak / part), dict.fromkeys(COLUMNS, float("nan"))
            reason = ""
            for kind, path in zip(COLUMNS[:2], paths.values(), strict=False):
                try:
                    found[kind] = played_ms(path, budget, step_ms) / step_ms
                except (RuntimeError, ValueError):
                    continue
            plan = planned(recorded, budget, step_ms)
            try:
                at = [budget] if plan is None else [budget, plan.capacity]
                for name, size in zip(("bound", "in room"), at, strict=False):
                    least = bound(paths["in_place"], size, step_ms)
                    found[name] = least["bound_ms"] / step_ms
            except (RuntimeError, ValueError) as error:
                reason = f"  {error}"
            predicted = [found[kind] for kind in COLUMNS[:2] if found[kind] == found[kind]]
            if predicted:
                found["ratio"] = min(predicted) / found["bound"]
            found["measured"] = measured(workload, part) or float("nan")
            if plan is not None:
                found["planned"] = plan.ms / step_ms
            cells = "".join(f"{'-' if it != it else format(it, '.2f'):>10}" for it in found.values())
            cpu = "-" if plan is None else f"{plan.cpu_ms:.0f}"
            print(f"{workload:40}{part:>6g}{step_ms:>10.1f}{cells}{cpu:>10}{reason}", flush=True)
            if found["ratio"] == found["ratio"] and found["in room"] == found["in room"]:
                yield found["ratio"], found["planned"] / found["in room"]


if __name__ == "__main__":
    sys.exit(main())
