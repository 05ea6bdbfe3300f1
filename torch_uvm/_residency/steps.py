"""Steps of training, for the residency engine, which finds them by itself when it is not told."""

from __future__ import annotations

from torch_uvm import _C
from torch_uvm._util.arguments import exact_keywords
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.log import step_ended


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
