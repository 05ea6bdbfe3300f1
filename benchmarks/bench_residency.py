"""Training with less device memory than it needs, by the residency engine and by other means, on a GPU.

Runs each column in a fresh process, the most important first, for at most --seconds. Columns of the engine
are measured once it has chosen a schedule, at most 40 steps after the warm-up, in groups of --steps. Groups
count while the host is at full speed (_host_speed.py; `calm` is their share), or all if there are none. Then
the budget is lifted, and a plan's prediction is made from a trace of the same process (`predicted`). Prints
one table, and writes JSON after each column. Every process that uses managed memory has a hard limit of
8 GiB. Nothing starts unless the card has that and 6 GiB free: managed memory beyond a card's free memory
can hang it.

    python benchmarks/bench_residency.py [--seconds 480] [--only TEXT]... [--json FILE] [--resume FILE]

--resume continues the run that wrote FILE, on the same kind of device. Finished columns are copied from it
with their commit and date; the others are run.

--rehearse runs every column in a few MiB on the CPU and the emulated accelerator, to test the script. Its
figures are meaningless and are only written where --json says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _residency_table as table
from _environment import RESULTS, describe
from _residency_goals import goals
from _residency_limits import GIB, LIMIT, MARGIN, MOST_BUDGET
from _residency_plan import DEFERRED, ENGINE, IN_CORE, PEERS, PLAN, Planned, Unresolved, budget_bytes, select
from _residency_processes import Child, environment
from _residency_sampler import Reader, Sampler, any_reader
from _results import write_results

WITHOUT_OURS = (IN_CORE, "save_on_cpu", "FSDP2 offload", "PagedAdamW", *PEERS)
NOMINAL_PEAK = 40 * 1024**2  # for a rehearsal, which does not measure the peak
FRAGMENTS = 1.05  # a budget of so many times the peak surely holds everything
MEASURED = 4  # seconds after which no further group of steps is begun
QUIET = "quiet"  # the file that exists while a column is timed
STARTING = 15  # minimum seconds for a column: with less time left none is started


class Refused(RuntimeError):
    """Running here would not be safe."""


def check_room(read: Reader) -> int:
    """Bytes free on the card.

    Raises:
        Refused: less than the limit and MARGIN.
    """
    free = read().free
    if free < LIMIT + MARGIN:
        needed = f"at least {(LIMIT + MARGIN) / GIB:.1f} GiB"
        raise Refused(
            f"the card has {free / GIB:.1f} GiB free; {LIMIT / GIB:.0f} GiB of managed memory take {needed}"
        )
    return free


class Bench:
    """Runs the columns of a plan one after the other and collects their rows."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        sampler: Sampler | None,
        earlier: Mapping[tuple[str, str], dict[str, Any]],
    ) -> None:
        self.args, self.folder, self.sampler, self.earlier = args, folder, sampler, earlier
        self.deadline = time.monotonic() + args.seconds
        self.rows: list[dict[str, Any]] = []
        self.traces: dict[str, Path] = {}
        self._waiting: dict[int, Child] = {}

    def run(self, plan: Sequence[Planned], after_each: Any) -> None:
        try:
            for place, planned in enumerate(plan):
                self.rows.append(self._row(plan, place, planned))
                after_each(self.rows[-1])
        finally:
            for child in self._waiting.values():
                child.end()

    def _row(self, plan: Sequence[Planned], place: int, planned: Planned) -> dict[str, Any]:
        if (planned.workload, planned.name) in self.earlier:
            return self.earlier[planned.workload, planned.name]
        row: dict[str, Any] = {
            "workload": planned.workload,
            "column": planned.column,
            "name": planned.name,
            "planned_budget": planned.budget,
            "spike": planned.spike,
            "status": "ok",
        }
        left = self.deadline - time.monotonic()
        if left < STARTING:
            return row | {"status": "not run: no time left"}
        try:
            row["budget"] = budget_bytes(planned, self.rows, NOMINAL_PEAK if self.args.rehearse else None)
        except Unresolved as error:
            return row | {"status": f"not run: {error}"}
        self._start_ahead(plan, place)
        child = self._waiting.pop(place)
        row |= self._measure(child, planned, place, row["budget"], min(self.args.timeout, left))
        table.derive(row, [*self.rows, row], self.traces.get(planned.workload))
        return row

    def _start_ahead(self, plan: Sequence[Planned], place: int) -> None:
        """Starts the processes of this and the next columns together, unless they are running. Waits until
        all have imported, so that no import runs during a measurement."""
        if place in self._waiting:
            return
        for next_place in range(place, min(place + self.args.ahead, len(plan))):
            if (plan[next_place].workload, plan[next_place].name) in self.earlier:
                continue
            ours = plan[next_place].column not in WITHOUT_OURS
            log = self.folder / f"{next_place}.log"
            variables = environment(self.args.rehearse, ours)
            self._waiting[next_place] = Child(log, variables, self.folder / f"{next_place}.ready")
        for child in self._waiting.values():
            child.wait_ready(60)

    def _measure(
        self, child: Child, planned: Planned, place: int, budget: int | None, seconds: float
    ) -> dict[str, Any]:
        report = self.folder / f"{place}.json"
        trained = planned.column in (ENGINE, DEFERRED) and planned.kind == "train" and not planned.spike
        wanted = trained and planned.column == ENGINE and planned.workload not in self.traces
        name = "-".join(re.findall(r"\w+", planned.workload))
        trace = str((self.args.traces or self.folder) / f"{name}.trace") if wanted else None
        on = "cuda" if not self.args.rehearse else "cpu" if planned.column in WITHOUT_OURS else "emu"
        spec = {
            "kind": planned.kind,
            "workload": planned.workload,
            "column": planned.column,
            "budget": budget,
            "device": on,
            "small": self.args.rehearse,
            "steps": self.args.steps,
            "warm_up": self.args.warm_up,
            "seconds": 0 if self.args.rehearse else MEASURED,
            "spike": planned.spike,
            "repeat": planned.column == "in core" and planned.kind == "train",
            "trace": trace,
            "predict": trained and self._fits_when_lifted(planned.workload),
            "report": str(report),
            "quiet": str(self.folder / QUIET),
        }
        before = self.sampler.now() if self.sampler else None
        begin = time.monotonic()
        try:
            child.tell(spec)
            wrong = child.wait(seconds)
        finally:
            child.end()
            (self.folder / QUIET).unlink(missing_ok=True)  # of a child that was killed while it measured
        found: dict[str, Any] = {"seconds": time.monotonic() - begin}
        if report.exists():
            found |= json.loads(report.read_text())
        if wrong or "error" in found:
            found["status"] = wrong if wrong and "error" not in found else f"failed: {found['error']}"
        elif "not_run" in found:
            found["status"] = f"not run: {found['not_run']}"
        elif "step_ms" not in found and "figures" not in found:
            found["status"] = "failed: it left no figures"
        if "status" in found:
            found["status"] = " ".join(found["status"].split())[:300]
        if found.get("trace"):
            self.traces[planned.workload] = Path(found["trace"])
        if self.sampler and before is not None:
            found |= self._seen_by_driver(found.get("moments", {}), before)
            self.sampler.settle(before)
        return found

    def _fits_when_lifted(self, workload: str) -> bool:
        plain = table.in_core(self.rows, workload)
        return self.args.rehearse or (plain is not None and FRAGMENTS * plain["max_allocated"] <= MOST_BUDGET)

    def _seen_by_driver(self, moments: dict[str, float], before: int) -> dict[str, Any]:
        assert self.sampler is not None
        found: dict[str, Any] = {"driver_before": before}
        for name, first, last in (
            ("driver_peak_setup", "begin", "made"),
            ("driver_peak", "made", "sampled"),
            ("driver_peak_steady", "done", "sampled"),
        ):
            if first in moments and last in moments:
                found[name] = self.sampler.peak(moments[first], moments[last])
        return found


def device_description() -> dict[str, Any]:
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        name, driver, memory = (part.strip() for part in done.stdout.split("\n")[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"device": "unknown"}
    return {"device": name, "driver": driver, "device_memory": memory}


def rows_that_ran(file: Path, about: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of an earlier run, by workload and name.

    Raises:
        Refused: the run was made on another device or with another torch.
        OSError, ValueError: the file does not exist, or is not a report of this script.
    """
    document = json.loads(file.read_text())
    if not isinstance(document, dict) or not {"environment", "rows"} <= document.keys():
        raise ValueError(f"{file} is no report of this benchmark")
    then = document["environment"]
    for key in ("device", "torch", "rehearsal"):
        if then.get(key) != about.get(key):
            raise Refused(f"{file} has {key} {then.get(key)}, and here it is {about.get(key)}")
    origin = {key: then.get(key) for key in ("commit", "date")}
    rows = [origin | row for row in document["rows"] if row["status"] == "ok"]
    return {(row["workload"], row["name"]): row for row in rows}


class Printer:
    """Prints rows as they arrive, under their workload."""

    def __init__(self) -> None:
        self._workload: str | None = None

    def __call__(self, row: dict[str, Any]) -> None:
        trained = "figures" not in row and row["workload"] not in ("rates", "launches", "operators")
        if self._workload is None:
            print(f"  {table.heading()}")
        if row["workload"] != self._workload:
            self._workload = row["workload"]
            print(f"{self._workload}:", flush=True)
        for line in [table.line(row)] if trained else table.call_lines(row):
            print(f"  {line}", flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--seconds", type=float, default=480, metavar="S", help="for all columns together (480)"
    )
    parser.add_argument("--timeout", type=float, default=90, metavar="S", help="for one column (90)")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help='columns with this regular expression in "workload: name"; several times: with any of them',
    )
    parser.add_argument("--steps", type=int, default=5, help="of a measured group (5)")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before them, the first included (8)")
    parser.add_argument("--ahead", type=int, default=6, help="processes that import at the same time (6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="run what this report's run did not")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="where recorded accesses are kept")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--rehearse", action="store_true", help="in a few MiB, without a GPU")
    args = parser.parse_args(arguments)
    for name in ("seconds", "timeout", "steps", "warm_up", "ahead"):
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
    found = None if args.rehearse else any_reader()
    if found is None and not args.rehearse:
        sys.exit("bench_residency.py needs a GPU, and NVML or nvidia-smi to see its memory")
    own = ["python", "benchmarks/bench_residency.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = describe(own) | {"limit": LIMIT, "rehearsal": args.rehearse}
    read = None
    if found is not None:
        reader_name, read = found
        try:
            about |= device_description() | {"free_at_start": check_room(read), "memory_seen_by": reader_name}
        except Refused as error:
            sys.exit(f"not safe to run: {error}")
    try:
        earlier = rows_that_ran(args.resume, about) if args.resume else {}
    except (OSError, ValueError, Refused) as error:
        sys.exit(f"cannot resume: {error}")
    if args.traces:
        args.traces = args.traces.resolve()
        args.traces.mkdir(parents=True, exist_ok=True)
    # A signal that ends this process also ends the children.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    target = args.json or Path(os.environ.get("OUT", RESULTS)) / "residency.json"
    document: dict[str, Any] = {"environment": about, "rows": [], "goals": []}
    printer = Printer()
    with tempfile.TemporaryDirectory() as folder:
        sampler = None if read is None else Sampler(read, is_quiet=(Path(folder) / QUIET).exists)
        bench = Bench(args, Path(folder), sampler, earlier)

        def after_each(row: dict[str, Any]) -> None:
            printer(row)
            document["rows"] = bench.rows
            document["goals"] = [vars(goal) | {"reached": goal.reached} for goal in goals(bench.rows)]
            if args.json or not args.rehearse:
                write_results(target, document)

        if sampler is None:
            bench.run(plan, after_each)
        else:
            with sampler:
                bench.run(plan, after_each)
    print("\n  * from the bytes that were moved: there is no trace to know the least from")
    print("\ngoals" + (" (a rehearsal: the figures mean nothing)" if args.rehearse else ""))
    for goal in goals(bench.rows):
        print(goal.line())
    return 1 if any(row["status"].startswith(("failed", "died", "hung")) for row in bench.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
