"""The columns that bench_residency.py runs, the most important first, and their budgets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _runs import GIB, MOST_BUDGET

MIB = 1024**2
IN_CORE, ENGINE, DEFERRED, AUTO = "in core", "engine", "engine, deferred", "engine, auto"
ENGINES = (ENGINE, DEFERRED, AUTO)
FSDP2, SAVE_ON_CPU = "FSDP2 offload", "save_on_cpu"
PEERS = OPTIMIZER, ACTIVATIONS, CHECKPOINTS = (
    "CPUOffloadOptimizer",
    "OffloadActivations",
    "checkpoint offload",
)
FITS = 1.3  # multiple of the peak in core
# A peer's reserved peak divided by this is a budget at which the engine should need no more than the peer.
OVERHEAD = 1.07


class Unresolved(Exception):
    """A budget cannot be computed. The message gives the reason."""


@dataclass(frozen=True)
class Planned:
    """A column to run. budget: "1/2" of the peak in core, "fits", or "as COLUMN"."""

    workload: str
    column: str
    budget: str = ""

    @property
    def name(self) -> str:
        return ", ".join(word for word in (self.column, self.budget) if word)

    def needs(self) -> list[str]:
        """Columns of the same workload that must run first."""
        if self.column == IN_CORE:
            return []
        return [IN_CORE, self.budget.removeprefix("as ")] if self.budget.startswith("as ") else [IN_CORE]

    def bytes(self, rows: Sequence[Mapping[str, Any]], nominal_peak: int | None) -> int | None:
        """The budget, from the rows of earlier columns; None for a column without a budget.

        nominal_peak: replaces a peak that was not measured; None: no replacement

        Raises:
            Unresolved: a row that it depends on was not measured, or it exceeds the allowed managed memory.
        """
        text = self.budget
        if not text:
            return None
        if text.startswith("as "):
            peer = text.removeprefix("as ")
            reserved = _peak(rows, self.workload, peer, "max_reserved", nominal_peak)
            budget = min(int(reserved / OVERHEAD), MOST_BUDGET)
        else:
            peak = _peak(rows, self.workload, IN_CORE, "max_allocated", nominal_peak)
            if text == "fits":
                budget = min(int(FITS * peak), MOST_BUDGET)
                if budget < 1.1 * peak:
                    raise Unresolved(f"would be over the {MOST_BUDGET / GIB:.1f} GiB that may be managed")
            else:
                budget = int(peak / float(text.removeprefix("1/")))
        budget -= budget % (2 * MIB)
        if budget > MOST_BUDGET:
            raise Unresolved(f"{budget / GIB:.2f} GiB; at most {MOST_BUDGET / GIB:.1f} GiB may be managed")
        return budget


def _peak(
    rows: Sequence[Mapping[str, Any]], workload: str, column: str, figure: str, nominal: int | None
) -> int:
    for row in rows:
        if row["workload"] == workload and row["column"] == column and not row["planned_budget"]:
            if row["status"] == "ok" and row.get(figure):
                return int(row[figure])
            if row["status"] == "ok" and nominal is not None:
                return nominal
    raise Unresolved(f"no peak is known of {workload!r}, {column}")


def _plan() -> list[Planned]:
    checkpointing, little, much = "16k tokens, checkpointing", "2k tokens", "16k tokens"
    long, language = "64k tokens, checkpointing", "language model"
    hooks = f"{language}, optimizer in backward"
    parts = ("1/1.5", "1/2", "1/4")
    plan: list[Planned] = []

    def add(workload: str, column: str, *budgets: str) -> None:
        if not any(it.workload == workload for it in plan):
            plan.append(Planned(workload, IN_CORE))
        plan.extend(Planned(workload, column, budget) for budget in budgets or [""])

    def beside(workload: str, *peers: str) -> None:
        """Peers, and the engine at no more memory than each."""
        for peer in peers:
            add(workload, peer)
        for column in (ENGINE, DEFERRED):
            add(workload, column, *(f"as {peer}" for peer in peers))

    for workload in (checkpointing, little):
        add(workload, ENGINE, *parts, "fits")
        add(workload, DEFERRED, *parts)
        add(workload, AUTO, *parts)
    beside(little, SAVE_ON_CPU, FSDP2)
    beside(checkpointing, FSDP2)
    beside(much, SAVE_ON_CPU, FSDP2)
    for workload in ("CNN", "LoRA", "2k tokens, checkpointing", language, hooks):
        add(workload, ENGINE, *parts)
    add(language, DEFERRED, "1/1.5")
    beside("CNN", SAVE_ON_CPU)
    add(long, ENGINE, "1/1.5", "1/2")
    beside(long, *PEERS)
    beside(language, CHECKPOINTS, OPTIMIZER)
    beside(checkpointing, CHECKPOINTS, OPTIMIZER)
    beside(much, ACTIVATIONS)
    beside(little, ACTIVATIONS, OPTIMIZER)
    beside("LoRA", CHECKPOINTS)
    add("language model, compiled", ENGINE, "1/1.5", "1/2", "fits")
    add("language model, CUDA graphs", ENGINE, "fits")
    add("decoding", ENGINE, "1/1.5", "1/2")
    add("vision transformer", ENGINE, *parts)
    add("ConvNeXt", ENGINE, *parts)
    add("graph network", ENGINE, "1/1.5")
    return plan


PLAN = _plan()


def select(plan: Sequence[Planned], texts: Sequence[str]) -> list[Planned]:
    """The columns with one of the texts, regular expressions, in "workload: name", and those that they are
    compared with.

    Raises:
        re.error: a text is no regular expression.
    """
    names = {planned: f"{planned.workload}: {planned.name}" for planned in plan}
    wanted = {planned for planned, name in names.items() if any(re.search(text, name) for text in texts)}
    needed = {(planned.workload, column) for planned in wanted for column in planned.needs()}
    return [p for p in plan if p in wanted or (not p.budget and (p.workload, p.column) in needed)]
