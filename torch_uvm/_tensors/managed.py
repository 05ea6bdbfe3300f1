"""Whether a tensor is managed."""

from __future__ import annotations

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import exact_keywords, show
from torch_uvm._util.compiler import break_the_graph


@exact_keywords
@break_the_graph
def is_managed(t: torch.Tensor) -> bool:
    """Whether the bytes of `t` are managed: addressable by the CPU and by every device.

    A view is managed if its base is. Tensors without bytes of their own (meta, sparse) are not.

    Args:
        t: a tensor of any shape, on any device.

    Raises:
        TypeError: `t` is not a tensor.

    >>> torch_uvm.is_managed(torch_uvm.memory.empty(4)), torch_uvm.is_managed(torch.empty(4))
    (True, False)
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"is_managed() takes a torch.Tensor; received {show(t)}")
    return _C.is_managed(t)
