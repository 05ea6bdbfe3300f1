"""What torch.compile and other tracers may record of moves.

A recorded graph has no bytes, so recording cannot know whether a tensor will be managed when the graph runs.
A move could only be recorded as a copy, and a later write through one label would not be visible through the
other. So moves are not recorded: `torch.compile` breaks the graph there and runs them between its parts.
Where a graph cannot be broken (`fullgraph=True`, `torch.export`), an error says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import _dynamo  # the C++ part: importing torch._dynamo takes a second
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedFakeTensorException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_F = TypeVar("_F", bound=Callable[..., Any])

_REASON = (
    "moves, hints, pins and steps run outside compiled graphs; a graph can contain "
    "torch.ops.torch_uvm.managed_copy and Tensor.to(..., managed=True, copy=True)"
)


def run_as_it_is(function: _F) -> _F:
    """Excludes `function`, and everything that it calls, from torch.compile."""
    frames = _dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def break_the_graph(function: _F) -> _F:
    """Makes torch.compile break the graph at a call of `function`, and run the call eagerly.

    torch.compiler.disable does the same, and would import torch._dynamo.
    """
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    return run_as_it_is(function)


def is_recorded(x: torch.Tensor) -> bool:
    """Whether `x` stands for another tensor in a graph that is being recorded."""
    if not isinstance(x, (FakeTensor, FunctionalTensor)):
        return torch._is_functional_tensor(x)
    return (
        isinstance(x, FunctionalTensor)
        or torch._guards.TracingContext.try_get() is not None
        or torch.compiler.is_exporting()
        or get_proxy_mode() is not None
    )


def refuse_to_record(call: str) -> None:
    """Raises the error at which torch.compile breaks the graph."""
    raise UnsupportedFakeTensorException(
        f"{call} cannot be recorded in a graph, as it is a move where the tensor is managed; accepted there: "
        "copy=True, which makes a copy in any case, and torch.ops.torch_uvm.managed_copy"
    )
