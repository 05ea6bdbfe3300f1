"""Goals of the residency engine, evaluated on the rows of bench_residency.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _residency_plan import PEERS

Row = Mapping[str, Any]
ENGINE = "engine"
ENGINES = (ENGINE, "engine, deferred", "engine, auto")
PARTS = {"1/1.5": 1.05, "1/2": 1.10, "1/4": 1.25}
FIRST = "16k tokens, checkpointing"


@dataclass
class Goal:
    """value: None if it was not measured. A measured goal is reached if the value is on the right side of the
    bound."""

    name: str
    value: float | None
    bound: float
    at_least: bool = False
    where: str = ""

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        verdict = {True: "reached", False: "NOT reached", None: "not measured"}[self.reached]
        value = "-" if self.value is None else f"{self.value:.3g}"
        bound = f"{'>=' if self.at_least else '<='} {self.bound:g}"
        return f"{self.name:<62} {value:>8} {bound:>9}  {verdict:<12} {self.where}".rstrip()


def engines(rows: Sequence[Row], workload: str | None = None) -> list[Row]:
    """The engine's training rows, without the rows of auxiliary measurements."""
    return [
        row
        for row in rows
        if row["column"] in ENGINES
        and row["status"] == "ok"
        and "step_ms" in row
        and workload in (None, row["workload"])
    ]


def better(rows: Sequence[Row]) -> list[Row]:
    """The fastest of the engine's columns at each budget."""

    def beaten(row: Row) -> bool:
        return any(
            other["column"] != row["column"]
            and other["workload"] == row["workload"]
            and other["planned_budget"] == row["planned_budget"]
            and other["step_ms"] < row["step_ms"]
            for other in rows
        )

    return [row for row in rows if not beaten(row)]


def figure(rows: Iterable[Row], workload: str, budget: str, key: str) -> tuple[float | None, str]:
    """The value of `key` for a workload and budget, and the name of its column."""
    for row in rows:
        if row["workload"] == workload and row["planned_budget"] == budget and not row.get("spike"):
            return row.get(key), row["column"]
    return None, ""


def worst(name: str, rows: Iterable[Row], key: str, bound: float) -> Goal:
    found = [(row[key], f"{row['workload']}, {row['name']}") for row in rows if row.get(key) is not None]
    value, where = max(found, default=(None, ""))
    return Goal(name, value, bound, where=where)


def against(rows: Sequence[Row], peer: str, bound: float) -> list[Goal]:
    """A peer's step time over the engine's best at the same or less peak device memory, by the driver's
    figures."""
    goals = []
    for other in rows:
        if other["column"] != peer or other["status"] != "ok" or "step_ms" not in other:
            continue
        fair = [
            row
            for row in engines(rows, other["workload"])
            if row.get("driver_bytes") is not None
            and other.get("driver_bytes") is not None
            and row["driver_bytes"] <= other["driver_bytes"]
        ]
        name = f"{peer} / engine at no more peak, {other['workload']}"
        if fair:
            best = min(fair, key=lambda row: row["step_ms"])
            goals.append(Goal(name, other["step_ms"] / best["step_ms"], bound, True, best["name"]))
        else:
            goals.append(Goal(name, None, bound, True))
    return goals


def calls(rows: Sequence[Row], what: str) -> Any:
    for row in rows:
        if row["workload"] == what and row["column"] == ENGINE and row["status"] == "ok":
            return row.get("figures")
    return None


def of_calls(rows: Sequence[Row]) -> list[Goal]:
    rates, launches, operators = (calls(rows, what) for what in ("rates", "launches", "operators"))
    goals = []
    back = [each["wall_gb_per_s"] for name, each in (rates or {}).items() if "written_back" in name]
    goals.append(Goal("write-back rate, GB/s", max(back, default=None), 50, True))
    late = launches and (launches["moving"]["p99.9_us"] - launches["without"]["p99.9_us"]) / 1e3
    goals.append(Goal("kernel launches, p99.9: ms more than without the engine", late, 1))
    costs = [each for each in operators or [] if "cost_ns" in each]
    most = max((each["cost_ns"] / 1e3 for each in costs), default=None)
    goals.append(Goal("engine cost of an operator, CPU-bound step, us (the most)", most, 1))
    for key in ("live", "operators"):
        goals.append(Goal(f"... as {key} grows tenfold, us more (the most)", growth(costs, key), 0.2))
    return goals


def growth(costs: Sequence[Row], key: str) -> float | None:
    """The largest increase, in microseconds, of an operator's cost when `key` grows tenfold and all else is
    equal."""
    other = "operators" if key == "live" else "live"
    found = [
        (b["cost_ns"] - a["cost_ns"]) / 1e3
        for a in costs
        for b in costs
        if a[other] == b[other] and b[key] == 10 * a[key]
    ]
    return max(found, default=None)


def goals(rows: Sequence[Row]) -> list[Goal]:
    trained = engines(rows)
    plain = better([row for row in trained if not row.get("spike")])
    found = []
    for part, bound in PARTS.items():
        value, where = figure(plain, FIRST, part, "over_in_core")
        found.append(Goal(f"{FIRST}, {part}: step / in core", value, bound, where=where))
    others = [row for row in plain if row["workload"] != FIRST and row["planned_budget"] != "fits"]
    found.append(worst("every other row: step / bound (the most)", others, "over_bound", 1.10))
    found += against(rows, "FSDP2 offload", 1.5)
    found += against(rows, "save_on_cpu", 2.5)
    for peer in PEERS:
        found += against(rows, peer, 1.0)
    found.append(worst("device memory over the budget (the most)", trained, "over_budget", 0.05))
    fits = [row for row in plain if row["planned_budget"] == "fits"]
    found.append(worst("fits: step / in core (the most)", fits, "over_in_core", 1.02))
    for row in trained:
        if row.get("after_spike"):
            ratio = row["after_spike"]["step_ms"] / row["step_ms"]
            found.append(Goal("steps after a batch four times the usual / before", ratio, 1.05))
    first = [row | {"cold": row["first_ms"] / row["step_ms"]} for row in map(dict, plain)]
    found.append(worst("first step / a planned step (the most)", first, "cold", 10))
    unequal = [row for row in rows if row.get("losses_equal") is False and row["column"] in ENGINES]
    compared = [row for row in trained if row.get("losses_equal") is not None]
    found.append(Goal("rows of the engine with other losses", len(unequal) if compared else None, 0))
    return found + of_calls(rows)
