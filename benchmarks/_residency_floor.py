"""The least time that a step can take within a budget."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lower_bound import LINK, bound, phase_floor

Row = MutableMapping[str, Any]
PHASES, MOVED = "least bytes, by phases", "bytes moved"


def by_bytes_moved(step_ms: float, traffic: Mapping[str, Any]) -> float:
    """Milliseconds: the step in core, or the time that the link needs for what was moved each way.

    An engine that moves too much has a high floor of this kind, and one that does not need to overlap all (a
    forward that only writes, a backward that only reads) would reach it by no plan.

    step_ms: in core
    traffic: a step's `fetched`, `used_in_place` and `written_back`, as `residency_stats` has them
    """
    into = traffic["fetched"]["bytes"] + traffic["used_in_place"]["bytes"]
    out = traffic["written_back"]["bytes"]
    return max(step_ms, float(into) / LINK * 1e3, float(out) / LINK * 1e3)


def add_floor(row: Row, plain: Mapping[str, Any], trace: Path | None) -> None:
    """Adds floor_ms and floor_kind: from the least bytes that the workload's trace allows, by phases, if
    there is a trace that can be read, else from the bytes that were moved. Never less than the step in core.

    trace: recorded at any budget; which storages are used when does not depend on it
    """
    traffic = row.get("statistics") or {}
    if not traffic.get("fetched"):
        return
    row["floor_ms"], row["floor_kind"] = by_bytes_moved(plain["step_ms"], traffic), MOVED
    if trace is None or not row.get("budget"):
        return
    try:
        least = bound(trace, row["budget"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        row["floor_error"] = f"{type(error).__name__}: {error}"
        return
    row["least"] = least
    phases = phase_floor(least, plain["forward_ms"], plain["backward_ms"])
    row["floor_ms"], row["floor_kind"] = max(plain["step_ms"], phases), PHASES
