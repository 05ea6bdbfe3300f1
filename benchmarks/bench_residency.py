"""Training with less device memory than it needs, by the residency engine and by other means, on a GPU.

Runs each column in a fresh process, the most important first, for at most --seconds. Columns of the engine
are measured once it has chosen a schedule, at most 150 steps after the warm-up. Then the budget is lifted,
and a plan's prediction is made from a trace of the same process (`predicted`). Prints one table, and writes
JSON after each column. Every process that uses managed memory has a hard limit of 8 GiB. Nothing starts
unless the card has that and 6 GiB free: managed memory beyond a card's free memory can hang it.

    python benchmarks/bench_residency.py [--seconds 480] [--only TEXT]... [--json FILE]

--rehearse runs every column in a few MiB on the CPU and the emulated accelerator, to test the script. Its
figures are meaningless and are only written where --json says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _residency_table as table
from _residency_goals import goals
from _residency_plan import DEFERRED, ENGINE, ENGINES, IN_CORE, PLAN, Planned, Unresolved, select
from _results import RESULTS, ROOT, describe, device_description, write_results
from _runs import LIMIT, MOST_BUDGET, Watch, environment, python, run_child

sys.path.insert(0, str(ROOT / "tests"))
from _gpu_guard import Refused, check_room, free_by_nvml

CHILD = Path(__file__).resolve().parent / "_residency_child.py"
NOMINAL_PEAK = 40 * 1024**2  # for a rehearsal, which does not measure the peak
FRAGMENTS = 1.05  # a budget of so many times the peak surely holds everything
STARTING = 15  # minimum seconds for a column: with less time left none is started
UNWRITTEN = ("losses", "what")  # figures of a row that are for comparisons in this process
NVML = {"NVML": free_by_nvml}  # the only reader: a CUDA context of this process would take memory


class Bench:
    """Runs the columns of a plan one after the other and collects their rows."""

    def __init__(self, args: argparse.Namespace, folder: Path, watch: Watch) -> None:
        self.args, self.folder, self.watch = args, folder, watch
        self.deadline = time.monotonic() + args.seconds
        self.rows: list[dict[str, Any]] = []
        self.traces: dict[str, Path] = {}

    def run(self, plan: Sequence[Planned], after_each: Callable[[dict[str, Any]], None]) -> None:
        for planned in plan:
            self.rows.append(self._row(planned))
            after_each(self.rows[-1])

    def _row(self, planned: Planned) -> dict[str, Any]:
        row: dict[str, Any] = {
            "workload": planned.workload,
            "column": planned.column,
            "name": planned.name,
            "planned_budget": planned.budget,
            "status": "ok",
        }
        left = self.deadline - time.monotonic()
        if left < STARTING:
            return row | {"status": "not run: no time left"}
        try:
            row["budget"] = planned.bytes(self.rows, NOMINAL_PEAK if self.args.rehearse else None)
        except Unresolved as error:
            return row | {"status": f"not run: {error}"}
        row |= self._measure(planned, row["budget"], min(self.args.timeout, left))
        table.derive(row, [*self.rows, row], self.traces.get(planned.workload))
        return row

    def _measure(self, planned: Planned, budget: int | None, seconds: float) -> dict[str, Any]:
        is_ours = planned.column in ENGINES
        predict = planned.column in (ENGINE, DEFERRED) and self._fits_when_lifted(planned.workload)
        name = "-".join(re.findall(r"\w+", f"{planned.workload} {planned.name}"))
        trace = self.folder / f"{name}.trace"
        variables = environment() | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONFAULTHANDLER": "1"}
        if is_ours:
            variables["TORCH_UVM_CONF"] = f"limit:{LIMIT}"
            variables |= {"TORCH_UVM_DEVICE": "emu"} if self.args.rehearse else {}
        spec = {
            "workload": planned.workload,
            "column": planned.column,
            "budget": budget,
            "device": "cuda" if not self.args.rehearse else "emu" if is_ours else "cpu",
            "small": self.args.rehearse,
            "steps": self.args.steps,
            "warm_up": self.args.warm_up,
            "repeat": planned.column == IN_CORE,
            "trace": str(trace),
            "predict": predict,
        }
        begin = time.monotonic()
        ran = run_child(python(CHILD, json.dumps(spec)), variables, seconds, self.watch)
        found: dict[str, Any] = {"seconds": time.monotonic() - begin}
        for said in ran.lines:
            if said["what"] == "row" and "device_bytes" in said:
                found["driver_bytes"] = said["device_bytes"]
            found |= {key: value for key, value in said.items() if key != "device_bytes"}
        if "not_run" in found:
            found["status"] = f"not run: {found['not_run']}"
        elif ran.status != "ok":
            found["status"] = ran.status
        elif "step_ms" not in found:
            found["status"] = "failed: it left no figures"
        if trace.exists() and planned.column == ENGINE:
            self.traces.setdefault(planned.workload, trace)
        return found

    def _fits_when_lifted(self, workload: str) -> bool:
        plain = table.in_core(self.rows, workload)
        return self.args.rehearse or (plain is not None and FRAGMENTS * plain["max_allocated"] <= MOST_BUDGET)


class Printer:
    """Prints rows as they arrive, under their workload."""

    def __init__(self) -> None:
        self._workload: str | None = None

    def __call__(self, row: dict[str, Any]) -> None:
        if self._workload is None:
            print(f"  {table.heading()}")
        if row["workload"] != self._workload:
            self._workload = row["workload"]
            print(f"{self._workload}:", flush=True)
        print(f"  {table.line(row)}", flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=480, metavar="S", help="for all columns (480)")
    parser.add_argument("--timeout", type=float, default=90, metavar="S", help="for one column (90)")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help='columns with this regular expression in "workload: name"; several times: with any of them',
    )
    parser.add_argument("--steps", type=int, default=10, help="measured (10)")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before them, the first included (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--rehearse", action="store_true", help="in a few MiB, without a GPU")
    args = parser.parse_args(arguments)
    for name in ("seconds", "timeout", "steps", "warm_up"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; accepted: at least 1")
    args.only = args.only or [""]
    for text in args.only:
        try:
            found = select(PLAN, [text])
        except re.error as error:
            parser.error(f"--only is {text!r}, which is no regular expression: {error}")
        if not found:
            parser.error(f"no column has {text!r} in its name; --list says which there are")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    plan = select(PLAN, args.only)
    if args.list:
        for planned in plan:
            print(f"{planned.workload}: {planned.name}")
        return 0
    own = ["python", "benchmarks/bench_residency.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = describe(own) | {"limit": LIMIT, "rehearsal": args.rehearse}
    if not args.rehearse:
        if not free_by_nvml():
            sys.exit("bench_residency.py needs a GPU, and NVML to see its memory")
        try:
            about |= device_description() | {"free_at_start": check_room(LIMIT, NVML)["NVML"]}
        except Refused as error:
            sys.exit(f"not safe to run: {error}")
    # A signal that ends this process also ends the children.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    target = args.json or Path(os.environ.get("OUT", RESULTS)) / "residency.json"
    document: dict[str, Any] = {"environment": about, "rows": []}
    printer = Printer()
    reader = None if args.rehearse else free_by_nvml
    with tempfile.TemporaryDirectory() as folder, Watch(reader) as watch:
        bench = Bench(args, Path(folder), watch)

        def after_each(row: dict[str, Any]) -> None:
            printer(row)
            document["rows"] += [{key: value for key, value in row.items() if key not in UNWRITTEN}]
            if args.json or not args.rehearse:
                write_results(target, document)

        bench.run(plan, after_each)
    print("\ngoals" + (" (a rehearsal: the figures mean nothing)" if args.rehearse else ""))
    for goal in goals(bench.rows):
        print(goal.line())
    return 1 if any(not row["status"].startswith(("ok", "not run")) for row in bench.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
