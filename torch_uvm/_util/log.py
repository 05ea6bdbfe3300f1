"""The log "torch_uvm": changes of settings, and what the residency engine has begun to do.

The engine itself logs nothing: it holds locks, and takes no GIL. Its counters are compared at the end of
each step.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from torch_uvm import _C

log = logging.getLogger("torch_uvm")


class Counts(NamedTuple):
    """What is compared at the end of each step."""

    observed: int
    written_back: int
    used_in_place: int
    over_budget: int
    failures: int

    @classmethod
    def now(cls) -> Counts:
        stats = _C.residency_stats()
        return cls(
            stats["plan_hits"] + stats["plan_misses"],
            stats["written_back"]["count"],
            stats["used_in_place"]["count"],
            stats["over_budget"],
            stats["failures"],
        )


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

    def new(self, counts: Counts) -> list[tuple[int, str]]:
        """Levels and messages for what changed in the counts at the end of a step."""
        with self._lock:
            new = [it for key, it in _ONCE.items() if getattr(counts, key) > 0 and key not in self._said]
            self._said.update(key for key in _ONCE if getattr(counts, key) > 0)
            watched = counts.observed > self._observed
            if watched != self._watched and (watched or counts.observed == self._observed):
                new.insert(0, (logging.INFO, _WATCHED if watched else _UNWATCHED))
            self._observed, self._watched = counts.observed, watched  # smaller after a reset
            return new


_messages = StepMessages()


def step_ended() -> None:
    """Logs what changed since the last step."""
    if log.isEnabledFor(logging.WARNING):
        for level, message in _messages.new(Counts.now()):
            log.log(level, message)
