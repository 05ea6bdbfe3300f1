"""The table that bench_replay_peers.py prints for a log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MIB = 1 << 20
# Fields of a Column, in the order of cpp/replay_peers.cpp.
FIGURES = (
    "calls",
    "last_iteration_calls",
    "peak_live",
    "peak_reserved",
    "runtime_allocations",
    "runtime_frees",
)
_HEADS = (
    "allocator",
    "ns/call",
    "in the last",
    "least",
    "in the last",
    "reserved",
    "at peak",
    "allocs",
    "frees",
)


@dataclass
class Column:
    """One allocator on one log. Each replay of the log has one time; the times are grouped by round."""

    name: str
    allocator: str  # its name in cpp/replay_peers.cpp
    options: str = ""  # options of our allocators, as in TORCH_UVM_CONF
    bytes: int | None = None  # initial size that it is given; None: it chooses
    calls: int = 0  # allocations and frees
    last_iteration_calls: int = 0
    peak_live: int = 0
    peak_reserved: int = 0
    runtime_allocations: int = 0
    runtime_frees: int = 0
    failure: str = ""
    seconds: list[list[float]] = field(default_factory=list)
    last_iteration_seconds: list[list[float]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The column as JSON. Replaces long lists of times by their median."""
        each = asdict(self)
        del each["seconds"], each["last_iteration_seconds"]
        if self.failure:
            return each
        return each | {
            "ns_per_call": self.ns_per_call,
            "last_iteration_ns_per_call": self.last_iteration_ns_per_call,
            "ns_per_call_of_rounds": [
                statistics.median(times) * 1e9 / self.calls for times in self.seconds if times
            ],
        }

    @property
    def ns_per_call(self) -> float:
        """The median over all replays of the log."""
        return statistics.median(sum(self.seconds, [])) * 1e9 / self.calls

    @property
    def last_iteration_ns_per_call(self) -> float:
        """The median time per call of the last iteration, when the allocator knows the loop. Includes the
        end of the iteration."""
        return statistics.median(sum(self.last_iteration_seconds, [])) * 1e9 / self.last_iteration_calls

    @property
    def least(self) -> tuple[float, float]:
        """The same two figures for the fastest replay."""
        return (
            min(sum(self.seconds, [])) * 1e9 / self.calls,
            min(sum(self.last_iteration_seconds, [])) * 1e9 / self.last_iteration_calls,
        )


def mib(count: float) -> str:
    return f"{count / MIB:.2f} MiB"


def table(columns: Sequence[Column], not_run: Mapping[str, str]) -> list[str]:
    """One line per column. A column that was not run states the reason."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for it in columns:
        if it.failure:
            continue
        least = it.least
        rows.append(
            (
                it.name,
                f"{it.ns_per_call:.0f}",
                f"{it.last_iteration_ns_per_call:.0f}",
                f"{least[0]:.0f}",
                f"{least[1]:.0f}",
                mib(it.peak_reserved),
                f"{100 * (it.peak_reserved / it.peak_live - 1):.1f} %",
                str(it.runtime_allocations),
                str(it.runtime_frees),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines += [
        f"{it.name.ljust(widths[0])}  failed: {it.failure.splitlines()[0]}" for it in columns if it.failure
    ]
    return [*lines, *(f"{name.ljust(widths[0])}  not run: {why}" for name, why in not_run.items())]


def verdicts(ours: Sequence[Column], others: Sequence[Column]) -> list[dict[str, Any]]:
    """Compares with each peer, over the whole log and over its last iteration. Takes our fastest column whose
    peak is at most the peer's; if there is none, the fastest of our columns with the lowest peak."""
    found = []
    for other in others:
        if other.failure:
            continue
        here = [it for it in ours if not it.failure]
        lowest = min((it.peak_reserved for it in here), default=0)
        for key in ("ns_per_call", "last_iteration_ns_per_call"):
            these = [it for it in here if it.peak_reserved <= max(other.peak_reserved, lowest)]
            if these:
                best = min(these, key=lambda it: float(getattr(it, key)))
                found.append(
                    {
                        "against": other.name,
                        "figure": key,
                        "ns": getattr(other, key),
                        "peak_reserved": other.peak_reserved,
                        "best_of_ours": best.name,
                        "its_ns": getattr(best, key),
                        "its_peak_reserved": best.peak_reserved,
                        "its_peak_is_no_higher": best.peak_reserved <= other.peak_reserved,
                    }
                )
    return found


def verdict_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    width = max((len(it["against"]) for it in found), default=0)
    lines = []
    for it in found:
        where = "in all " if it["figure"] == "ns_per_call" else "in last"
        ratio = f"{it['ns'] / it['its_ns']:.2f} times as fast"
        peak = "" if it["its_peak_is_no_higher"] else f", WITH A HIGHER PEAK: {mib(it['its_peak_reserved'])}"
        versus = f"against {it['against'].ljust(width)} {mib(it['peak_reserved']):>10}"
        lines.append(f"{versus}, {where}: {ratio} ({it['best_of_ours']}){peak}")
    return lines
