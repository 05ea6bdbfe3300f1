"""Lower bound of a step's time within a budget."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lower_bound import LINK, bound, phase_floor

Row = MutableMapping[str, Any]
PHASES, MOVED = "least bytes, by phases", "bytes moved"


def by_bytes_moved(step_ms: float, traffic: Mapping[str, Any]) -> float:
    """Milliseconds: the maximum of the step in core and the link's time for the bytes moved each way.

    An engine that moves more bytes than necessary raises this bound. No schedule reaches it if transfers
    cannot be fully overlapped, because forward only writes and backward only reads.

    step_ms: in core
    traffic: `fetched`, `used_in_place` and `written_back` of a step, as in `residency_stats`
    """
    into = traffic["fetched"]["bytes"] + traffic["used_in_place"]["bytes"]
    out = traffic["written_back"]["bytes"]
    return max(step_ms, float(into) / LINK * 1e3, float(out) / LINK * 1e3)


def add_floor(row: Row, plain: Mapping[str, Any], trace: Path | None) -> None:
    """Adds floor_ms and floor_kind. Uses the workload's trace if one is readable: the least bytes that it
    allows, by phase. Otherwise uses the bytes that were moved. The result is at least the step in core.

    trace: recorded at any budget; the order of uses does not depend on it
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
