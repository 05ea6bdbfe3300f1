"""The lower bound of a row's step, by lower_bound.py."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any


def add_bound(row: MutableMapping[str, Any], plain: Mapping[str, Any], trace: Path | None) -> None:
    """Adds `bound`, what `lower_bound.bound` returns, or `bound_error`.

    Deferred updates run in another order than the trace's, so rows that have them, or may, have no bound.

    Args:
        plain: the workload's row in core; the trace's durations are scaled to its step.
        trace: recorded at any budget: the order of uses does not depend on it.
    """
    if trace is None or not row.get("budget") or row["column"] != "engine":
        return
    try:
        from lower_bound import bound  # needs scipy

        row["bound"] = bound(trace, row["budget"], plain["step_ms"])
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        row["bound_error"] = f"{type(error).__name__}: {error}"
