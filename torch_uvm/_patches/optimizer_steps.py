"""Every optimizer of torch.optim marks the ends of its steps for the residency engine."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from torch_uvm import _C
from torch_uvm._util.log import step_ended

_lock = threading.Lock()


def _mark(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # The engine finds steps without marks, so a graph that is compiled is not broken for one.
    if not torch.compiler.is_compiling():
        _C.mark_step()
        step_ended()


def mark_optimizer_steps() -> None:
    """Makes every optimizer mark its steps from now on. Calling it again does nothing."""
    with _lock:
        # A flag of our own would be wrong if Ctrl-C came between the registration and its assignment.
        if _mark not in _global_optimizer_post_hooks.values():
            register_optimizer_step_post_hook(_mark)
