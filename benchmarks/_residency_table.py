"""The rows of bench_residency.py: derived figures, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from _residency_plan import ENGINE, IN_CORE
from _runs import GIB

Row = MutableMapping[str, Any]


def in_core(rows: Sequence[Mapping[str, Any]], workload: str) -> Mapping[str, Any] | None:
    for row in rows:
        if row["workload"] == workload and row["column"] == IN_CORE and row["status"] == "ok":
            return row
    return None


def derive(row: Row, rows: Sequence[Mapping[str, Any]], trace: Path | None = None) -> None:
    """Adds derived figures to a row, from it and from its workload's row in core if that was measured.

    over_in_core    step / step in core
    bound, over_bound    of the engine's rows, if the workload has a `trace`; over_bound: step / bound
    losses_equal    to the last bit, to those in core, as far as both go; None: plain runs differ themselves,
                    or may: PyTorch warned of a kernel that is not deterministic
    outside_bytes   of the row in core: device memory outside of all allocators: the context, kernels' code
    over_budget     bytes of managed memory on the device over the budget / the budget - 1
    """
    plain = in_core(rows, row["workload"])
    if row is plain and "driver_bytes" in row and "max_reserved" in row:
        row["outside_bytes"] = row["driver_bytes"] - row["max_reserved"]
    if plain is None or row["status"] != "ok" or "step_ms" not in row:
        return
    row["over_in_core"] = row["step_ms"] / plain["step_ms"]
    if plain.get("repeatable") is False:
        row["losses_equal"] = None
    elif row is not plain:
        both = min(len(row["losses"]), len(plain["losses"]))
        equal = row["losses"][:both] == plain["losses"][:both]
        row["losses_equal"] = None if plain.get("not_deterministic") and not equal else equal
    add_bound(row, plain, trace)
    if "bound" in row:
        row["over_bound"] = row["step_ms"] / row["bound"]["bound_ms"]
    if row.get("budget") and "driver_bytes" in row and "outside_bytes" in plain:
        managed = row["driver_bytes"] - plain["outside_bytes"] - row.get("native_reserved", 0)
        row["over_budget"] = managed / row["budget"] - 1


def add_bound(row: Row, plain: Mapping[str, Any], trace: Path | None) -> None:
    """Adds `bound`, what `lower_bound.bound` returns, or `bound_error`. The trace's durations are scaled to
    the step of the row in core.

    Deferred updates run in another order than the trace's, so rows that have them, or may, have no bound.
    """
    if trace is None or not row.get("budget") or row["column"] != ENGINE:
        return
    try:
        from lower_bound import bound  # needs scipy

        row["bound"] = bound(trace, row["budget"], plain["step_ms"])
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        row["bound_error"] = f"{type(error).__name__}: {error}"


def scaled(value: float | None, unit: float, digits: int = 2) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def equality(row: Mapping[str, Any]) -> str:
    if row.get("repeatable"):
        return "repeat"
    if "losses_equal" not in row:
        return "-"
    return {True: "equal", False: "NO", None: "(plain differs)"}[row["losses_equal"]]


# Heading and width.
HEADINGS = {
    "column": 30, "budget": 7, "step ms": 9, "/core": 6, "bound": 8, "/bound": 7, "first s": 8, "driver": 7,
    "over": 7, "GB in": 7, "out": 6, "place": 6, "wait": 7, "miss": 6, "losses": 15,
}  # fmt: skip
TROUBLE = ("over_budget", "failures")  # statistics of the engine, reported if not 0


def heading() -> str:
    return aligned(list(HEADINGS))


def aligned(cells: Sequence[str]) -> str:
    widths = list(HEADINGS.values())
    return " ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])


def line(row: Mapping[str, Any]) -> str:
    """A row as a line under `heading`."""
    if row["status"] != "ok" or "step_ms" not in row:
        return f"{row['name']:<30} {scaled(row.get('budget'), GIB):>7} {row['status']}"
    traffic = row.get("statistics") or {}
    bound, over = (row.get("bound") or {}).get("bound_ms"), row.get("over_budget")

    def of(kind: str, figure: str = "bytes") -> float | None:
        return traffic[kind][figure] if kind in traffic else None

    cells = [
        str(row["name"]),
        scaled(row.get("budget"), GIB),
        scaled(row["step_ms"], 1, 1),
        scaled(row.get("over_in_core"), 1),
        scaled(bound, 1, 1),
        scaled(row.get("over_bound"), 1),
        scaled(row["first_ms"], 1e3),
        scaled(row.get("driver_bytes"), GIB),
        "-" if over is None else f"{over * 100:+.1f}%",
        *(scaled(of(kind), 1e9) for kind in ("fetched", "written_back", "used_in_place")),
        scaled(of("waited", "ms"), 1, 1),
        scaled(traffic.get("plan_misses"), 1, 0),
        equality(row),
    ]
    notes = [f"{traffic[key]:g} {key.replace('_', ' ')} a step" for key in TROUBLE if traffic.get(key)]
    return f"{aligned(cells)}  {', '.join(notes)}".rstrip()
