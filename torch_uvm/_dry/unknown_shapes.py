"""Results whose shapes depend on values, of operands that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from torch_uvm._dry.results import New, Result, meta_of
from torch_uvm._dry.values import is_virtual

_Arguments = dict[str, Any]
_MASKS = (torch.bool, torch.uint8)


def _rows(size: tuple[int, ...], dtype: torch.dtype) -> New:
    return New(size, make_contiguous_strides_for(size), dtype)


def _chosen(mask: Tensor) -> int:
    """How many elements of a mask are true: half of one without values. Real numbers are not zero."""
    if is_virtual(mask):
        return mask.numel() // 2 if mask.dtype in _MASKS else mask.numel()
    return int(mask.count_nonzero())


def _masked_select(given: _Arguments) -> Result:
    size = torch.broadcast_shapes(given["self"].shape, given["mask"].shape)
    return _rows((_chosen(given["mask"].expand(size)),), given["self"].dtype)


def _unique(given: _Arguments) -> Result:
    """As if all were different: elements, or slices along a dimension."""
    x = given["self"]
    size, count = (x.numel(),), x.numel()
    inverse = tuple(x.shape)
    if given.get("dim") is not None:
        size, count = tuple(x.shape), x.shape[given["dim"]]
        inverse = (count,)
    sizes = (
        inverse if given.get("return_inverse") else (0,),
        (count,) if given.get("return_counts") else (0,),
    )
    return (_rows(size, x.dtype), *(_rows(it, torch.int64) for it in sizes))


def _bincount(given: _Arguments) -> Result:
    weights = given.get("weights")
    dtype = torch.int64 if weights is None else torch.float64
    if weights is not None and weights.dtype == torch.float32:
        dtype = torch.float32
    bins = 1 if is_virtual(given["self"]) else int(given["self"].max()) + 1
    return _rows((max(given.get("minlength") or 0, bins),), dtype)


def _index(given: _Arguments) -> Result:
    """Indexing by masks, each as if it were the numbers of its true elements."""
    indices: list[Tensor | None] = []
    for index in given["indices"]:
        if index is not None and index.dtype in _MASKS:
            flat = torch.empty(_chosen(index), dtype=torch.int64, device="meta")
            indices += [flat] * index.dim()
        else:
            indices.append(None if index is None else meta_of(index))
    out = torch.ops.aten.index.Tensor(meta_of(given["self"]), indices)
    return New(tuple(out.shape), tuple(out.stride()), out.dtype)


#: By operator, its result, from the arguments by name.
RESULTS: dict[str, Callable[[_Arguments], Result]] = {
    "aten::nonzero": lambda it: _rows((_chosen(it["self"]), it["self"].dim()), torch.int64),
    "aten::masked_select": _masked_select,
    "aten::_unique2": _unique,
    "aten::unique_consecutive": _unique,
    "aten::unique_dim": _unique,
    "aten::bincount": _bincount,
    "aten::repeat_interleave": lambda it: _rows((it["repeats"].numel(),), torch.int64),
    "aten::index": _index,
}


def decided_by(op: torch._ops.OpOverload, name: str, given: _Arguments) -> list[Tensor]:
    """The operands whose values decide the shapes of the operator's results. The host waits for such values.

    Args:
        given: the arguments by name.
    """
    if name == "aten::index":
        return [it for it in given["indices"] if it is not None and it.dtype in _MASKS]
    if name == "aten::repeat_interleave":
        is_unknown = op._overloadname == "Tensor" and given.get("output_size") is None
        return [given["repeats"]] if is_unknown else []
    return [given["mask" if "mask" in given else "self"]] if name in RESULTS else []
