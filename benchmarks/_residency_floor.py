"""The least time that a step can take within a budget, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LINK = 52e9  # bytes a second each way, as measured on an H200


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
