"""Steps of training, for the residency engine, which finds them by itself when it is not told."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_uvm import _C
from torch_uvm.arguments import exact_keywords
from torch_uvm.notes import step_ended
from torch_uvm.tracing import break_the_graph

_lock = threading.Lock()
_marking: _Marker | None = None


@exact_keywords
@break_the_graph
def step() -> None:
    """Says that a step ends here, which the residency engine then looks for repetitions of.

    It finds steps without, and takes each `Optimizer.step` for the end of one. Worth saying where a step
    has no optimizer: in evaluation, for instance. Does nothing where there is no budget.

    >>> for batch in range(2):
    ...     x = torch_uvm.ones(4) * batch
    ...     torch_uvm.step()
    """
    _C.mark_step()
    step_ended()


class _Marker:
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Ctrl-C may come between the registration of one and its assignment: that one does nothing. Steps are
        # found without marks: no reason to break a graph that is compiled.
        if self is _marking and not torch.compiler.is_compiling():
            _C.mark_step()
            step_ended()


def mark_optimizer_steps() -> None:
    """Has every optimizer mark its steps from now on. Calling it again does nothing."""
    global _marking
    with _lock:
        if _marking is None:
            marker = _Marker()
            register_optimizer_step_post_hook(marker)
            _marking = marker
