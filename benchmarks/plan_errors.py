"""Predicted against measured: what `python -m torch_uvm plan` says of the benchmark's rows on GPUs.

    python benchmarks/plan_errors.py [--only TEXT] [--write docs/plan.md]

A row is a workload, a budget and a way to update of a file in RESULTS, for which there is a trace of a run
in core. The prediction takes nothing but the trace, with the durations that it has, and the profile of the
card. Traces are of an H200 (traces/); some files have traces of their own (OWN_TRACES). Rows of
bench_residency.py since it predicts have what it predicted then, by a trace of the row's process; those of
three files were computed again, by the same traces.
docs/plan.md says which engine each file measured. Peaks are compared with those of the runs that the traces
are of (traces/index.json), and with those without torch_uvm (the rows in core), less cuBLAS's workspaces.
--write puts both tables into the page, between its marks.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch_uvm import _C
from torch_uvm._tools.card_files import load_card
from torch_uvm._tools.plans import DEFERRED, IN_PLACE, Loop
from torch_uvm.traces import read_trace

MIB = 1 << 20
FOLDER = Path(__file__).resolve().parent
RESULTS = {  # and their cards
    "residency.json": "h200",
    "residency_schedules.json": "h200",
    "residency_h100.json": "h100",
    "residency_h100_workloads.json": "h100",
    "residency_h100_again.json": "h100",
    "residency_h100_traced.json": "h100",
    "residency_h100_workspaces.json": "h100",
    "residency_h200_traced.json": "h200",
    "residency_h100_own.json": "h100",
    "residency_h100_alone.json": "h100",
    "residency_h100_alone_again.json": "h100",
    "residency_h200_early.json": "h200",
    "residency_h200_leaving.json": "h200",
    "residency_h100_leaving.json": "h100",
    "residency_h200_settled.json": "h200",
    "residency_h200_held.json": "h200",
    "residency_h200_shared.json": "h200",
    "residency_h200_goals.json": "h200",
    "residency_h100_goals.json": "h100",
}
# Their rows are on the page.
SHOWN = (
    "residency_h200_traced.json",
    "residency_h100_alone.json",
    "residency_h100_alone_again.json",
    "residency_h200_shared.json",
    "residency_h200_goals.json",
)
OWN_TRACES = {  # folders of traces/, recorded on the machine of the rows
    "residency_h100_traced.json": "h100",
    "residency_h100_workspaces.json": "h100_workspaces",
}
CALM = 0.10  # the largest spread of steps in core that the host does not dominate
COLUMNS = {"engine": IN_PLACE, "engine, deferred": DEFERRED}
MARK = "<!-- benchmarks/plan_errors.py: {} -->"


@dataclass(frozen=True)
class Row:
    """``predicted`` and ``measured`` in ms. ``predicted``: None if one operator exceeds the budget.

    ``in_core``: a step in core, in the trace and measured, in the row's process if the trace is of it.
    ``spread``: how much the steps of the process in core differ, as a part of their median. ``file``: of
    results/.
    """

    workload: str
    what: str
    budget: int
    file: str
    predicted: float | None
    measured: float
    in_core: tuple[float, float]
    spread: float

    @property
    def error(self) -> float:
        """The part by which the prediction is too high."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Peak:
    """Bytes without a budget. ``plain``: without torch_uvm; None: not measured."""

    workload: str
    predicted: int
    measured: int
    plain: int | None

    @property
    def error(self) -> float:
        """The part by which the prediction is too high."""
        return self.predicted / self.measured - 1


def measured_rows(name: str = "residency.json") -> list[dict[str, Any]]:
    """Rows of a file of results/ that ended well, of workloads with a trace; of equal ones the warmest."""
    stored = json.loads((FOLDER / "results" / name).read_text())
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in stored["rows"]:
        if row.get("status", "ok") == "ok" and row["workload"] in index(name):
            row = {"spike": False, "warm_up_steps": 0, "name": row["column"]} | row
            row |= {"file": name, "card": RESULTS[name]}
            key = (row["workload"], row["column"], row["name"], row["budget"])
            if key not in found or row["warm_up_steps"] >= found[key]["warm_up_steps"]:
                found[key] = row
    return list(found.values())


def traces(file: str) -> Path:
    """The folder of the traces for rows of a file of results/."""
    return FOLDER / "traces" / OWN_TRACES.get(file, "")


@cache
def index(file: str = "") -> dict[str, Any]:
    """What was recorded: workload -> kind of trace -> figures of its run."""
    found: dict[str, Any] = json.loads((traces(file) / "index.json").read_text())
    return found


@cache
def loop_of(workload: str, optimizer: str, card: str, file: str = "") -> Loop:
    """The loop of a workload's trace."""
    kind = "deferred" if optimizer == DEFERRED else "in_place"
    packed = (traces(file) / index(file)[workload][kind]["file"]).read_bytes()
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
            loop = loop_of(row["workload"], optimizer, row["card"], row["file"])
            step_ms = loop.point(row["budget"], optimizer).step_ms
        yield Row(
            row["workload"],
            optimizer,
            row["budget"],
            row["file"],
            step_ms if own is None else own["step_ms"],
            row["step_ms"],
            (loop.in_core_ms, plain["step_ms"]) if own is None else (own["traced_ms"], own["in_core_ms"]),
            (max(plain["steps_ms"]) - min(plain["steps_ms"])) / plain["step_ms"],
        )


def peak_rows(only: str = "") -> Iterator[Peak]:
    """Peaks without a budget, of every workload that has a trace."""
    rows = measured_rows()
    for workload, traces in index().items():
        if only not in workload:
            continue
        ours = [row for row in rows if row["workload"] == workload]
        workspaces = [row["native_reserved"] for row in ours if row["column"] in COLUMNS]
        in_core = [row["max_allocated"] for row in ours if row["column"] == "in core"]
        plain = in_core[0] - workspaces[0] if in_core else None
        peak = loop_of(workload, IN_PLACE, "h200").memory.peak_bytes
        yield Peak(workload, peak, traces["in_place"]["peak_bytes"], plain)


def summary(rows: Sequence[Row | Peak], most: float, middle: float | None) -> str:
    """How many rows are within the goal ``most``, and the median of the errors beside its goal."""
    errors = [abs(row.error) for row in rows]
    within = sum(error <= most for error in errors)
    text = f"{within} of {len(rows)} rows are within the goal of {most:.0%}. The worst is {max(errors):.0%}"
    if middle is not None:
        text += f". The median of the errors is {statistics.median(errors):.1%}, the goal {middle:.0%}"
    return text + "."


def step_table(rows: list[Row]) -> str:
    """The rows of the newest files, and how far those of each file are off."""
    lines = [
        "| workload | optimizer | file | budget | in core, ms: trace / measured, spread "
        "| predicted | measured | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.workload} | {row.what} | {short(row.file)} | {_C.format_bytes(row.budget)} "
        f"| {row.in_core[0]:.1f} / {row.in_core[1]:.1f}, {row.spread:.0%} "
        + (
            f"| - | {row.measured:.1f} | - |"
            if row.predicted is None
            else f"| {row.predicted:.1f} | {row.measured:.1f} | {row.error:+.0%} |"
        )
        for row in rows
        if row.file in SHOWN
    ]
    predicted = [row for row in rows if row.predicted is not None]
    found = [summary([row for row in predicted if row.file in SHOWN], 0.10, 0.05)]
    found += [
        "",
        "| rows of | rows | within 10 % | median | of these, spread at most 10 % | within 10 % | median |",
    ]
    found += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for file in RESULTS:
        ours = [row for row in predicted if row.file == file]
        if ours:
            calm = [row for row in ours if row.spread <= CALM]
            found.append(f"| {short(file)} | {cells(ours)} | {cells(calm)} |")
    return "\n".join([*lines, "", *found])


def short(file: str) -> str:
    return file.removesuffix(".json").removeprefix("residency_")


def cells(rows: Sequence[Row]) -> str:
    """How many rows, how many within the goal, and the median of the errors."""
    if not rows:
        return "0 | - | -"
    errors = [abs(row.error) for row in rows]
    return f"{len(errors)} | {sum(error <= 0.10 for error in errors)} | {statistics.median(errors):.1%}"


def peak_table(rows: list[Peak]) -> str:
    lines = [
        "| workload | predicted peak, MiB | measured | error | without torch_uvm |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.workload} | {row.predicted / MIB:.0f} | {row.measured / MIB:.0f} | {row.error:+.1%} "
        f"| {'-' if row.plain is None else format(row.plain / MIB, '.0f')} |"
        for row in rows
    ]
    return "\n".join([*lines, "", summary(rows, 0.01, None)])


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted against measured.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="such as docs/plan.md")
    arguments = parser.parse_args()
    if arguments.only and arguments.write:
        parser.error("--write needs all rows: leave --only out")
    steps, peaks = list(step_rows(arguments.only)), list(peak_rows(arguments.only))
    tables = {"steps": step_table(steps), "peaks": peak_table(peaks)}
    print("\n\n".join(tables.values()))
    if arguments.write is not None:
        page = written(arguments.write.read_text(encoding="utf-8"), tables)
        arguments.write.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
