"""The log "torch_uvm": changes of settings, and what the residency engine has begun to do.

The engine itself logs nothing: it holds locks, and takes no GIL. Its counters are compared at the end of
each step.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from torch_uvm import _C

log = logging.getLogger("torch_uvm")


_WATCHED = "operators are observed: memory is short, or was until now"
_UNWATCHED = "operators are no longer observed: steps repeat and fit the budget"
_ONCE = {
    "written_back": (logging.INFO, "the budget is reached: tensors are evicted to the host"),
    "used_in_place": (logging.INFO, "operators use tensors on the host, across the link (logged once)"),
    "over_budget": (
        logging.WARNING,
        "an operator, or what cannot be evicted, needs more than the budget (logged once; "
        "stats()['over_budget'] counts): "
        "raise the budget, or use a smaller batch; a foreach optimizer needs less with fused=True",
    ),
    "failures": (
        logging.WARNING,
        "a call of the runtime failed in the residency engine; results are correct (logged once; "
        "stats()['failures'] counts): free memory on this machine, or lower the limits",
    ),
}


class StepMessages:
    """Compares counters between steps, so that each change is reported once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._observed = 0
        self._watched = False

    def new(self, stats: dict[str, Any]) -> list[tuple[int, str]]:
        """Levels and messages for what changed in the engine's statistics at the end of a step."""
        observed = stats["plan_hits"] + stats["plan_misses"]
        with self._lock:
            began = [key for key in _ONCE if _count(stats[key]) > 0 and key not in self._said]
            self._said.update(began)
            new = [_ONCE[key] for key in began]
            watched = observed > self._observed
            if watched != self._watched and (watched or observed == self._observed):
                new.insert(0, (logging.INFO, _WATCHED if watched else _UNWATCHED))
            self._observed, self._watched = observed, watched  # smaller after a reset
            return new


def _count(figure: Any) -> int:
    return int(figure["count"] if isinstance(figure, dict) else figure)


_messages = StepMessages()


def step_ended() -> None:
    """Logs what changed since the last step."""
    if log.isEnabledFor(logging.WARNING):
        for level, message in _messages.new(_C.residency_stats()):
            log.log(level, message)
