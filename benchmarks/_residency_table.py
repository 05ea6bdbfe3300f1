"""The rows of bench_residency.py: derived figures, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from _residency_bound import add_bound
from _residency_limits import GIB

Row = MutableMapping[str, Any]
PLAIN = "in core"


def in_core(rows: Sequence[Mapping[str, Any]], workload: str) -> Mapping[str, Any] | None:
    for row in rows:
        if row["workload"] == workload and row["column"] == PLAIN and row["status"] == "ok":
            return row
    return None


def derive(row: Row, rows: Sequence[Mapping[str, Any]], trace: Path | None = None) -> None:
    """Adds derived figures to a row, from it and from its workload's row in core if that was measured.

    over_in_core    step / step in core
    bound, over_bound    of the engine's rows, if the workload has a `trace`; over_bound: step / bound
    losses_equal    to the last bit, to those in core, as far as both go; None: plain runs differ themselves,
                    or may: PyTorch warned of a kernel that is not deterministic
    driver_bytes    peak in use on the device by the driver's figures, minus its use before the process
    outside_bytes   the part of it outside of all allocators: the context, kernels' code, libraries
    over_budget     bytes of managed memory on the device over the budget / the budget - 1
    """
    plain = in_core(rows, row["workload"])
    if row.get("driver_peak") is not None and row.get("driver_before") is not None:
        row["driver_bytes"] = row["driver_peak"] - row["driver_before"]
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


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def gb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:+.1f}%"


def equality(row: Mapping[str, Any]) -> str:
    if row.get("repeatable"):
        return "repeat"
    if "losses_equal" not in row:
        return "-"
    return {True: "equal", False: "NO", None: "(plain differs)"}[row["losses_equal"]]


# Heading, width, content.
HEADINGS = [
    ("column", 30),
    ("budget", 7),
    ("step ms", 9),
    ("wall", 8),
    ("/core", 6),
    ("bound", 8),
    ("/bound", 7),
    ("first s", 8),
    ("driver", 7),
    ("over", 7),
    ("GB in", 7),
    ("out", 6),
    ("place", 6),
    ("wait", 7),
    ("miss", 6),
    ("losses", 15),
]

TROUBLE = ("over_budget", "failures")  # statistics of the engine, reported if not 0


def heading() -> str:
    return " ".join(
        name.ljust(width) if place == 0 else name.rjust(width) for place, (name, width) in enumerate(HEADINGS)
    )


def line(row: Mapping[str, Any]) -> str:
    """A row of training as a line under `heading`."""
    name = str(row["name"])
    if row["status"] != "ok" or "step_ms" not in row:
        return f"{name:<30} {gib(row.get('budget')):>7} {row['status']}"
    traffic = row.get("statistics") or {}

    def of(kind: str, figure: str = "bytes") -> float | None:
        return traffic[kind][figure] if kind in traffic else None

    cells = [
        gib(row.get("budget")),
        number(row["step_ms"]),
        number(row.get("wall_ms")),
        number(row.get("over_in_core"), 2),
        number((row.get("bound") or {}).get("bound_ms")),
        number(row.get("over_bound"), 2),
        number(row["first_ms"] / 1e3, 2),
        gib(row.get("driver_bytes")),
        share(row.get("over_budget")),
        gb(of("fetched")),
        gb(of("written_back")),
        gb(of("used_in_place")),
        number(of("waited", "ms")),
        number(traffic.get("plan_misses"), 0),
        equality(row),
    ]
    widths = [width for _, width in HEADINGS[1:]]
    text = " ".join([name.ljust(30), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))])
    notes = [f"{traffic[key]:g} {key.replace('_', ' ')} a step" for key in TROUBLE if traffic.get(key)]
    return f"{text}  {', '.join(notes)}".rstrip()


def call_lines(row: Mapping[str, Any]) -> list[str]:
    """Prints rows that are not training."""
    if row["status"] != "ok" or "figures" not in row:
        return [f"{row['name']:<30} {row['status']}"]
    figures = row["figures"]
    if row["workload"] == "rates":
        return [
            f"{name:<30} {gb(each['bytes'])} GB at {number(each['wall_gb_per_s'])} GB/s by the clock, "
            f"{number(each['events_gb_per_s'])} by the engine's events"
            for name, each in figures.items()
        ]
    if row["workload"] == "launches":
        lines = [
            f"{name:<30} p50 {each['p50_us']:.1f}  p99 {each['p99_us']:.1f}  p99.9 {each['p99.9_us']:.1f}  "
            f"worst {each['worst_us']:.1f} us"
            for name, each in figures.items()
            if isinstance(each, dict)
        ]
        return [*lines, f"{'fetched meanwhile':<30} {gb(figures['fetched_bytes'])} GB"]
    return [
        f"{each['live']:>6} live, {each['operators']:>7,} operators  "
        + "  ".join(f"{key.removesuffix('_ns')} {value:,.0f}" for key, value in each.items() if "_ns" in key)
        + " ns"
        for each in figures
    ]
