"""Synthetic rows of the residency benchmarks, for tests of their table and goals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from _runs import GIB  # noqa: E402

LITTLE = "2k tokens"


def row(column: str = "in core", part: str = "", **figures: Any) -> dict[str, Any]:
    common = {"workload": LITTLE, "column": column, "name": f"{column}, {part}", "planned_budget": part}
    return common | {"status": "ok"} | figures


def in_core() -> dict[str, Any]:
    return row(
        step_ms=100.0,
        first_ms=500.0,
        losses=["0x1p+0", "0x1p-1"],
        repeatable=True,
        driver_bytes=5 * GIB,
        max_reserved=4 * GIB,
        max_allocated=3 * GIB,
    )


def traffic(into: float, out: float, place: float) -> dict[str, Any]:
    moved = {"fetched": into, "written_back": out, "used_in_place": place, "waited": 0.0}
    counts = {name: {"count": 1.0, "bytes": each, "ms": 2.0} for name, each in moved.items()}
    return counts | {"plan_hits": 10.0, "plan_misses": 0.0}


def engine(**figures: Any) -> dict[str, Any]:
    usual = {
        "step_ms": 150.0,
        "first_ms": 900.0,
        "losses": ["0x1p+0", "0x1p-1"],
        "budget": 2 * GIB,
        "driver_bytes": int(3.2 * GIB),
        "native_reserved": 0,
        "statistics": traffic(5.2e9, 2.6e9, 1.04e9),
    }
    return row("engine", "1/2", **(usual | figures))
