"""Every optimizer of torch.optim marks the ends of its steps for the residency engine."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_uvm import _C
from torch_uvm._util.log import step_ended

_lock = threading.Lock()
_marking: _Marker | None = None


class _Marker:
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Ctrl-C may come between the registration of a marker and its assignment: that marker does nothing.
        # The engine finds steps without marks, so a graph that is compiled is not broken for one.
        if self is _marking and not torch.compiler.is_compiling():
            _C.mark_step()
            step_ended()


def mark_optimizer_steps() -> None:
    """Makes every optimizer mark its steps from now on. Calling it again does nothing."""
    global _marking
    with _lock:
        if _marking is None:
            marker = _Marker()
            register_optimizer_step_post_hook(marker)
            _marking = marker
