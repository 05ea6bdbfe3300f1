"""Results whose shapes depend on values: a dry run takes the largest that there can be, if that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_uvm._dry.results import New, Result, meta_of

_Arguments = dict[str, Any]


def _rows(size: tuple[int, ...], dtype: torch.dtype) -> New:
    strides = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return New(size, tuple(reversed(strides)), dtype)


def _nonzero(given: _Arguments) -> Result:
    x = given["self"]
    return _rows((x.numel(), x.dim()), torch.int64)


def _masked_select(given: _Arguments) -> Result:
    size = torch.broadcast_shapes(given["self"].shape, given["mask"].shape)
    return _rows((size.numel(),), given["self"].dtype)


def _unique(given: _Arguments) -> Result:
    x = given["self"]
    inverse = x.shape if given.get("return_inverse") else (0,)
    counts = (x.numel(),) if given.get("return_counts") else (0,)
    return (_rows((x.numel(),), x.dtype), _rows(tuple(inverse), torch.int64), _rows(counts, torch.int64))


def _unique_dim(given: _Arguments) -> Result:
    x, dim = given["self"], given["dim"]
    inverse = (x.shape[dim],) if given.get("return_inverse") else (0,)
    counts = (x.shape[dim],) if given.get("return_counts") else (0,)
    return (_rows(tuple(x.shape), x.dtype), _rows(inverse, torch.int64), _rows(counts, torch.int64))


def _bincount(given: _Arguments) -> Result:
    weights = given.get("weights")
    dtype = torch.int64 if weights is None else torch.float64
    if weights is not None and weights.dtype == torch.float32:
        dtype = torch.float32
    return _rows((max(given.get("minlength") or 0, 1),), dtype)


def _repeat_interleave(given: _Arguments) -> Result:
    repeats = given["repeats"]
    size = given.get("output_size")
    return _rows((repeats.numel() if size is None else size,), torch.int64)


def _index(given: _Arguments) -> Result | None:
    """Indexing by a mask: as if all of it were true."""
    indices: list[Tensor | None] = []
    found = False
    for index in given["indices"]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found = True
            flat = torch.empty(index.numel(), dtype=torch.int64, device="meta")
            indices += [flat] * index.dim()
        else:
            indices.append(None if index is None else meta_of(index))
    if not found:
        return None
    out = torch.ops.aten.index.Tensor(meta_of(given["self"]), indices)
    return New(tuple(out.shape), tuple(out.stride()), out.dtype)


_RESULTS: dict[str, Callable[[_Arguments], Result | None]] = {
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::_unique2": _unique,
    "aten::unique_consecutive": _unique,
    "aten::unique_dim": _unique_dim,
    "aten::bincount": _bincount,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::index": _index,
}

#: What is assumed of the values, by operator.
TAKEN = {
    "aten::nonzero": "all elements",
    "aten::masked_select": "all elements",
    "aten::_unique2": "all elements differ",
    "aten::unique_consecutive": "all elements differ",
    "aten::unique_dim": "all rows differ",
    "aten::bincount": "minlength bins",
    "aten::repeat_interleave": "each once, or output_size",
    "aten::index": "all of the mask",
}


def result_of(op: torch._ops.OpOverload, name: str, args: Sequence[Any], kwargs: _Arguments) -> Result | None:
    """The result of an operator whose shape depends on values; None: the operator is no such one."""
    result = _RESULTS.get(name)
    if result is None or (name == "aten::repeat_interleave" and op._overloadname != "Tensor"):
        return None
    names = [it.name for it in op._schema.arguments]
    return result(dict(zip(names, args, strict=False)) | kwargs)
