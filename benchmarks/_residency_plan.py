"""The columns that bench_residency.py runs, the most important first, and their budgets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _residency_limits import GIB, MOST_BUDGET

MIB = 1024**2
IN_CORE, ENGINE, DEFERRED, AUTO = "in core", "engine", "engine, deferred", "engine, auto"
PEERS = OPTIMIZER, ACTIVATIONS, CHECKPOINTS = (
    "CPUOffloadOptimizer",
    "OffloadActivations",
    "checkpoint offload",
)
CALLS = ("rates", "launches", "operators")
FITS = 1.3  # multiple of the peak in core
# A peer's reserved peak divided by this is a budget at which the engine should need no more than the peer.
OVERHEAD = 1.07


class Unresolved(Exception):
    """A budget cannot be computed. The message gives the reason."""


@dataclass(frozen=True)
class Planned:
    """A column to run. budget: "1/2" of the peak in core, "fits", "1.1x" it, "7.4GiB", or "as COLUMN"."""

    workload: str
    column: str
    budget: str = ""
    spike: bool = False

    @property
    def kind(self) -> str:
        return "calls" if self.workload in CALLS else "train"

    @property
    def name(self) -> str:
        words = [self.column, self.budget, "one batch of 4x" if self.spike else ""]
        return ", ".join(word for word in words if word)

    def needs(self) -> list[str]:
        """Columns of the same workload that must run first."""
        if self.kind == "calls" or self.column == IN_CORE:
            return []
        return [IN_CORE, self.budget.removeprefix("as ")] if self.budget.startswith("as ") else [IN_CORE]


def _plan() -> list[Planned]:
    checkpointing, little, much = "16k tokens, checkpointing", "2k tokens", "16k tokens"
    little_checkpointing = "2k tokens, checkpointing"
    long, language = "64k tokens, checkpointing", "language model"
    parts = ("1/1.5", "1/2", "1/4")

    def engines(workload: str, *budgets: str) -> list[Planned]:
        return [Planned(workload, ENGINE, budget) for budget in budgets]

    def deferred(workload: str, *budgets: str) -> list[Planned]:
        return [Planned(workload, DEFERRED, budget) for budget in budgets]

    def auto(workload: str, *budgets: str) -> list[Planned]:
        return [Planned(workload, AUTO, budget) for budget in budgets]

    def beside(workload: str, *peers: str) -> list[Planned]:
        """Peers, and the engine at no more memory than each."""
        budgets = [f"as {peer}" for peer in peers]
        theirs = [Planned(workload, peer) for peer in peers]
        return [*theirs, *engines(workload, *budgets), *deferred(workload, *budgets)]

    return [
        Planned(checkpointing, IN_CORE),
        *engines(checkpointing, *parts),
        *deferred(checkpointing, *parts),
        *auto(checkpointing, *parts),
        Planned(little, IN_CORE),
        *engines(little, *parts, "fits"),
        *deferred(little, *parts),
        *auto(little, *parts),
        Planned("rates", ENGINE),
        Planned("operators", ENGINE),
        Planned(little, "save_on_cpu"),
        Planned(little, "FSDP2 offload"),
        Planned(checkpointing, "FSDP2 offload"),
        *engines(little, "as FSDP2 offload"),
        *engines(checkpointing, "as FSDP2 offload"),
        *deferred(little, "as FSDP2 offload"),
        *deferred(checkpointing, "as FSDP2 offload"),
        Planned(much, IN_CORE),
        Planned(much, "save_on_cpu"),
        Planned(much, "FSDP2 offload"),
        *engines(much, "as save_on_cpu", "as FSDP2 offload", "1/4"),
        *deferred(much, "as save_on_cpu", "as FSDP2 offload"),
        Planned("CNN", IN_CORE),
        *engines("CNN", "1/1.5", "1/2", "1/4"),
        Planned("LoRA", IN_CORE),
        *engines("LoRA", "1/1.5", "1/2", "1/4"),
        Planned(little_checkpointing, IN_CORE),
        *engines(little_checkpointing, *parts),
        Planned("launches", ENGINE),
        Planned(checkpointing, ENGINE, "fits"),
        Planned(little, "managed, resident"),
        Planned(little, "managed, faults"),
        Planned(little, ENGINE, "1.1x", spike=True),
        Planned("CNN", "save_on_cpu"),
        Planned(little, "PagedAdamW"),
        Planned("operators", IN_CORE),
        Planned(long, IN_CORE),
        *beside(long, CHECKPOINTS, ACTIVATIONS, OPTIMIZER),
        *engines(long, "1/1.5", "1/2"),
        Planned(language, IN_CORE),
        *beside(language, CHECKPOINTS, OPTIMIZER),
        *engines(language, *parts),
        *deferred(language, "1/1.5"),
        *beside(checkpointing, CHECKPOINTS, OPTIMIZER),
        *beside(much, ACTIVATIONS),
        *beside(little, ACTIVATIONS, OPTIMIZER),
        *beside("LoRA", CHECKPOINTS),
        Planned("language model, optimizer in backward", IN_CORE),
        *engines("language model, optimizer in backward", *parts),
        Planned("language model, compiled", IN_CORE),
        *engines("language model, compiled", "1/1.5", "1/2", "fits"),
        Planned("language model, CUDA graphs", IN_CORE),
        *engines("language model, CUDA graphs", "fits"),
        Planned("decoding", IN_CORE),
        *engines("decoding", "1/1.5", "1/2"),
        Planned("vision transformer", IN_CORE),
        *engines("vision transformer", "1/1.5", "1/2", "1/4"),
        Planned("ConvNeXt", IN_CORE),
        *engines("ConvNeXt", *parts),
        Planned("graph network", IN_CORE),
        *engines("graph network", "1/1.5"),
    ]


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


def budget_bytes(planned: Planned, rows: Sequence[Mapping[str, Any]], nominal_peak: int | None) -> int | None:
    """The budget of a column, from the rows of earlier columns; None for a column without a budget.

    nominal_peak: replaces a peak that was not measured; None: no replacement

    Raises:
        Unresolved: a row that it depends on was not measured, or it exceeds the allowed managed memory.
    """
    text = planned.budget
    if not text:
        return None
    if text.endswith("GiB"):
        budget = int(float(text.removesuffix("GiB")) * GIB)
    elif text.startswith("as "):
        peer = text.removeprefix("as ")
        reserved = _peak(rows, planned.workload, peer, "max_reserved", nominal_peak)
        budget = min(int(reserved / OVERHEAD), MOST_BUDGET)
    else:
        peak = _peak(rows, planned.workload, IN_CORE, "max_allocated", nominal_peak)
        if text == "fits":
            budget = min(int(FITS * peak), MOST_BUDGET)
            if budget < 1.1 * peak:
                raise Unresolved(f"would be over the {MOST_BUDGET / GIB:.1f} GiB that may be managed")
        elif text.endswith("x"):
            budget = int(float(text.removesuffix("x")) * peak)
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
