"""The end of a training step, as a mark for the residency engine."""

from __future__ import annotations

from torch_uvm import _C
from torch_uvm._util.arguments import exact_keywords
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.log import step_ended


@exact_keywords
@break_the_graph
def step() -> None:
    """Marks the end of a step for the residency engine, which looks for repeating steps.

    The engine finds steps without marks, and every `Optimizer.step` marks one. Call it where a step has no
    optimizer, such as in evaluation. Without a budget it does nothing.

    >>> for batch in range(2):
    ...     x = torch_uvm.memory.ones(4) * batch
    ...     torch_uvm.step()
    """
    _C.mark_step()
    step_ended()
