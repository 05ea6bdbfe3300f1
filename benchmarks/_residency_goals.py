"""Goals of the residency engine, evaluated on the rows of bench_residency.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _residency_plan import ENGINES, FSDP2, PEERS, SAVE_ON_CPU

Row = Mapping[str, Any]
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
    """The engine's rows that ended well. Stored results may also have rows of calls alone, and of spikes."""
    return [
        row
        for row in rows
        if row["column"] in ENGINES
        and row["status"] == "ok"
        and "step_ms" in row
        and not row.get("spike")
        and workload in (None, row["workload"])
    ]


def better(rows: Sequence[Row]) -> list[Row]:
    """The fastest of the engine's columns at each budget."""
    fastest: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["workload"], row["planned_budget"]
        if key not in fastest or row["step_ms"] < fastest[key]["step_ms"]:
            fastest[key] = row
    return list(fastest.values())


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
        most = other.get("driver_bytes")
        fair = [
            row
            for row in engines(rows, other["workload"])
            if most is not None and row.get("driver_bytes") is not None and row["driver_bytes"] <= most
        ]
        name = f"{peer} / engine at no more peak, {other['workload']}"
        if fair:
            best = min(fair, key=lambda row: row["step_ms"])
            goals.append(Goal(name, other["step_ms"] / best["step_ms"], bound, True, best["name"]))
        else:
            goals.append(Goal(name, None, bound, True))
    return goals


def goals(rows: Sequence[Row]) -> list[Goal]:
    trained = engines(rows)
    plain = better(trained)
    found = []
    for part, bound in PARTS.items():
        of_part = [row for row in plain if (row["workload"], row["planned_budget"]) == (FIRST, part)]
        found.append(worst(f"{FIRST}, {part}: step / in core", of_part, "over_in_core", bound))
    others = [row for row in plain if row["workload"] != FIRST and row["planned_budget"] != "fits"]
    found.append(worst("every other row: step / bound (the most)", others, "over_bound", 1.10))
    found += against(rows, FSDP2, 1.5)
    found += against(rows, SAVE_ON_CPU, 2.5)
    for peer in PEERS:
        found += against(rows, peer, 1.0)
    found.append(worst("device memory over the budget (the most)", trained, "over_budget", 0.05))
    fits = [row for row in plain if row["planned_budget"] == "fits"]
    found.append(worst("fits: step / in core (the most)", fits, "over_in_core", 1.02))
    first = [row | {"cold": row["first_ms"] / row["step_ms"]} for row in map(dict, plain)]
    found.append(worst("first step / a planned step (the most)", first, "cold", 10))
    compared = [row for row in trained if row.get("losses_equal") is not None]
    unequal = sum(not row["losses_equal"] for row in compared)
    found.append(Goal("rows of the engine with other losses", unequal if compared else None, 0))
    return found
