"""Predicted against measured: what `python -m torch_uvm plan` says of the benchmark's rows on GPUs.

    python benchmarks/plan_errors.py [--only TEXT] [--write docs/plan.md]

A row is a workload, a budget and a way to update of a file in RESULTS, for which there is a trace of a run
in core. The prediction takes nothing but the trace, with the durations that it has, and the profile of the
card. Traces are of an H200 (traces/). Rows of bench_residency.py since it predicts have what it predicted
then, by a trace of the row's process. Peaks are compared with those of the runs that the traces are of
(traces/index.json). Every row is printed; --write puts a table of all workloads into the page, between its
marks.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch_uvm import _C
from torch_uvm._tools.cards import load_card
from torch_uvm._tools.plans import DEFERRED, IN_PLACE, Loop
from torch_uvm.traces import read_trace

MIB = 1 << 20
FOLDER = Path(__file__).resolve().parent
RESULTS = {  # and their cards
    "residency.json": "h200",
    "residency_h100.json": "h100",
    "residency_h200_goals.json": "h200",
    "residency_h100_goals.json": "h100",
}
# Those with schedules chosen by time; the table of the page is about their rows.
SHOWN = ("residency_h100.json", "residency_h200_goals.json", "residency_h100_goals.json")
COLUMNS = {"engine": IN_PLACE, "engine, deferred": DEFERRED}
MARK = "<!-- benchmarks/plan_errors.py: {} -->"


@dataclass(frozen=True)
class Row:
    """``predicted`` and ``measured`` in ms. ``predicted``: None if one operator exceeds the budget.

    ``in_core``: a step in core, in the trace and measured, in the row's process if the trace is of it.
    ``spread``: how much the steps of the process in core differ, as a part of their median. ``own``: the
    trace is of the row's process. ``file``: of results/.
    """

    workload: str
    what: str
    budget: int
    file: str
    predicted: float | None
    measured: float
    in_core: tuple[float, float]
    spread: float
    own: bool

    @property
    def error(self) -> float | None:
        """The part by which the prediction is too high."""
        return None if self.predicted is None else self.predicted / self.measured - 1

    def line(self) -> str:
        traced, measured = self.in_core
        predicted = "-" if self.predicted is None else f"{self.predicted:.1f}"
        error = "-" if self.error is None else f"{self.error:+.0%}"
        return (
            f"{self.workload}, {self.what}, {_C.format_bytes(self.budget)}, {self.file}: "
            f"in core {traced:.1f} and {measured:.1f} ms, spread {self.spread:.0%}; "
            f"{predicted} of {self.measured:.1f} ms, {error}"
        )


@dataclass(frozen=True)
class Peak:
    """Bytes without a budget."""

    workload: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """The part by which the prediction is too high."""
        return self.predicted / self.measured - 1


def measured_rows(name: str = "residency.json") -> list[dict[str, Any]]:
    """Rows of a file of results/ that ended well, of workloads with a trace; of equal ones the warmest."""
    stored = json.loads((FOLDER / "results" / name).read_text())
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in stored["rows"]:
        if row["status"] == "ok" and row["workload"] in index():
            row = {"spike": False} | row | {"file": name, "card": RESULTS[name]}
            key = row["workload"], row["name"]
            if key not in found or row["warm_up_steps"] >= found[key]["warm_up_steps"]:
                found[key] = row
    return list(found.values())


@cache
def index() -> dict[str, Any]:
    """What was recorded: workload -> kind of trace -> figures of its run."""
    found: dict[str, Any] = json.loads((FOLDER / "traces" / "index.json").read_text())
    return found


@cache
def loop_of(workload: str, optimizer: str, card: str) -> Loop:
    """The loop of a workload's trace."""
    kind = "deferred" if optimizer == DEFERRED else "in_place"
    packed = (FOLDER / "traces" / index()[workload][kind]["file"]).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(lzma.decompress(packed))
        return Loop(read_trace(path), load_card(card))


def step_rows(only: str = "") -> Iterator[Row]:
    """Steps within budgets."""
    rows = [row for name in RESULTS for row in measured_rows(name)]
    in_core = {(row["file"], row["workload"]): row for row in rows if row["column"] == "in core"}
    for row in rows:
        optimizer = COLUMNS.get(row["column"])
        if optimizer is None or row["spike"] or only not in row["workload"]:
            continue
        plain = in_core[row["file"], row["workload"]]
        own = row.get("predicted")
        if own is None:
            loop = loop_of(row["workload"], optimizer, row["card"])
            predicted = loop.point(row["budget"], optimizer).step_ms
            in_core_ms = loop.in_core_ms, plain["step_ms"]
        else:
            predicted, in_core_ms = own["step_ms"], (own["traced_ms"], own["in_core_ms"])
        yield Row(
            row["workload"],
            optimizer,
            row["budget"],
            row["file"],
            predicted,
            row["step_ms"],
            in_core_ms,
            plain["spread"],
            own is not None,
        )


def peak_rows(only: str = "") -> Iterator[Peak]:
    """Peaks without a budget, of every workload that has a trace."""
    for workload, traces in index().items():
        if only in workload:
            peak = loop_of(workload, IN_PLACE, "h200").memory.peak_bytes
            yield Peak(workload, peak, traces["in_place"]["peak_bytes"])


def accuracy_table(rows: Sequence[Row], peaks: Sequence[Peak]) -> str:
    """The rows of the newest files, by workload and by kind, and the errors of peaks; the worst of all."""
    shown = [row for row in rows if row.file in SHOWN]
    groups = [(it.workload, [row for row in shown if row.workload == it.workload], it.error) for it in peaks]
    kinds: list[tuple[str, list[Row], float | None]] = [
        ("all", shown, max((it.error for it in peaks), key=abs)),
        ("... traced in the same process", [row for row in shown if row.own], None),
        ("... traced in another process", [row for row in shown if not row.own], None),
    ]
    lines = ["| workload | rows | within 10% | median error | worst | peak |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name, found, peak in [*groups, *kinds]:
        errors = [row.error for row in found if row.error is not None]
        if errors:
            within = sum(abs(it) <= 0.10 for it in errors)
            median, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
            last = "-" if peak is None else f"{peak:+.1%}"
            lines.append(f"| {name} | {len(found)} | {within} | {median:.1%} | {worst:+.0%} | {last} |")
    return "\n".join(lines)


def written(page: str, tables: dict[str, str]) -> str:
    """The page with these tables between its marks.

    Raises:
        ValueError: it lacks a mark.
    """
    for name, table in tables.items():
        begin, end = MARK.format(name), MARK.format(f"end of {name}")
        if begin not in page or end not in page:
            raise ValueError(f"the page lacks {begin} or {end}")
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="such as docs/plan.md")
    arguments = parser.parse_args()
    if arguments.only and arguments.write:
        parser.error("--write needs all rows: leave --only out")
    steps, peaks = list(step_rows(arguments.only)), list(peak_rows(arguments.only))
    accuracy = accuracy_table(steps, peaks)
    for row in steps:
        print(row.line())
    for peak in peaks:
        sizes = f"{peak.predicted / MIB:.0f} of {peak.measured / MIB:.0f} MiB"
        print(f"{peak.workload}: peak {sizes}, {peak.error:+.1%}")
    print(f"\n{accuracy}")
    if arguments.write is not None:
        page = written(arguments.write.read_text(encoding="utf-8"), {"accuracy": accuracy})
        arguments.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
