"""Autocast as on CUDA. `emu` has the CPU's lists of operators, so that its results are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_KEY = "AutocastPrivateUse1"
# What CUDA casts and the CPU does not (aten/src/ATen/autocast_mode.h): these to the lower precision, those
# to the widest that they get. All others give float32: arguments are cast, or the result, if it has a dtype.
_LOWER = frozenset(
    "_convolution convolution cudnn_convolution cudnn_convolution_transpose addmv addr mv chain_matmul "
    "einsum linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell _scaled_dot_product_flash_attention".split()
)
_WIDEST = frozenset("addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add".split())


def cast_as_on_cuda(kernels: torch.library.Library) -> None:
    """Registers what the lists of CUDA and of the CPU do not share."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        on_cuda = has_kernel(name, "AutocastCUDA")
        if name.startswith("aten::") and on_cuda != has_kernel(name, _KEY):
            own = name.removeprefix("aten::")
            kernels.impl(own, _cast(own) if on_cuda else torch.library.fallthrough_kernel, _KEY)


def _cast(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    names = [it.name for it in op._schema.arguments]
    to_lower, to_widest = packet in _LOWER, packet in _WIDEST
    has_dtype = "dtype" in names and not to_lower

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            if has_dtype:
                given = dict(zip(names, args, strict=False)) | kwargs
                if given.get("dtype") is None and _is_cast(given[names[0]]):
                    given["dtype"] = torch.float32
                return op(**given)
            to = torch.get_autocast_dtype("emu") if to_lower or to_widest else torch.float32
            if to_widest:
                found: set[torch.dtype] = set()
                tree_map_only(Tensor, lambda it: found.add(it.dtype), (args, kwargs))
                to = torch.float32 if torch.float32 in found else to
            args, kwargs = tree_map_only(Tensor, lambda it: it.to(to) if _is_cast(it) else it, (args, kwargs))
            return op(*args, **kwargs)

    return call


def _is_cast(given: Tensor) -> bool:
    return given.device.type == "emu" and given.is_floating_point() and given.dtype != torch.float64
