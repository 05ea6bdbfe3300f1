"""Values that a dry run makes up where an operator computes some from tensors that have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Counts, of which a script may divide by one.
_COUNTS = ("aten::sum", "aten::count_nonzero", "aten::prod")
_ALL = ("aten::all", "aten::equal", "aten::_is_all_true")
_ORDERS = ("aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::_to_copy")
_GUESSED = "_torch_uvm_guessed"  # an attribute of storages: the results of comparisons
_UNIFORM = "_torch_uvm_uniform"  # an attribute of storages: uniform random numbers
#: Operators whose integers are places along a dimension, all of it if none is given.
_PLACES = frozenset(
    f"aten::{it}"
    for it in (
        *("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "multinomial", "kthvalue"),
        *("median", "nanmedian", "mode", "cummax", "cummin", "searchsorted", "bucketize"),
    )
)


def assumed(operator: str, dtype: torch.dtype) -> float | int | bool:
    """A single value.

    Real numbers and counts are 1, so that scripts may divide by them and take their logarithms, and so are
    integers that are converted from real numbers. Other integers are 0. Of booleans, `all` and `equal` are
    true and the others false: nothing is NaN, and tensors are equal.
    """
    if dtype == torch.bool:
        return operator in _ALL
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0
    return 1 if operator in _COUNTS or operator == "aten::_to_copy" else 0


def decides(operator: str, operands: Sequence[Tensor]) -> bool:
    """Whether the operator asks if all is as it should be.

    Scripts raise where it is not: where `all` is false, or `any` of a comparison is true. `ctc_loss` does
    so itself where lengths do not fit.
    """
    if operator == "aten::any":
        return any(hasattr(it.untyped_storage(), _GUESSED) for it in operands)
    return operator in _ALL or operator.startswith("aten::_ctc_loss")


def note_uniform(operator: str, tensor: Tensor) -> None:
    """Comparisons with uniform random numbers hold as often as their other operand says."""
    if operator in ("aten::rand", "aten::rand_like"):
        setattr(tensor.untyped_storage(), _UNIFORM, True)


def fill(out: Tensor, operator: str, arguments: dict[str, Any]) -> None:
    """Writes plausible values into a result.

    Places along a dimension take turns, so that a router uses all of its experts alike; those of a row
    differ. A comparison holds for its expected share of elements: half of them, if nothing is known.

    Args:
        arguments: the operator's, by name.
    """
    given, other = arguments.get("self"), arguments.get("other")
    if out.dtype == torch.bool and operator in _ORDERS:
        share = 0.5
        if isinstance(given, Tensor) and hasattr(given.untyped_storage(), _UNIFORM):
            if isinstance(other, (int, float)):
                share = min(max(float(other), 0.0), 1.0)
                share = share if operator in _ORDERS[:2] else 1 - share
        at = torch.arange(out.numel(), dtype=torch.float64)
        setattr(out.untyped_storage(), _GUESSED, True)
        out.copy_((((at + 1) * share).floor() > (at * share).floor()).view(out.shape))
    elif out.dtype == torch.bool and operator in ("aten::eq", "aten::ne"):
        is_same = isinstance(other, Tensor) and given is not None and other.data_ptr() == given.data_ptr()
        out.fill_(is_same == (operator == "aten::eq"))
    elif operator in _PLACES and not out.dtype.is_floating_point and out.dtype != torch.bool:
        _take_turns(out, operator, arguments)
    else:
        out.fill_(assumed(operator, out.dtype))


def _take_turns(out: Tensor, operator: str, arguments: dict[str, Any]) -> None:
    dim: int | None
    if operator in ("aten::searchsorted", "aten::bucketize"):
        places = arguments["sorted_sequence" if operator == "aten::searchsorted" else "boundaries"]
        dim, count = -1, places.size(-1) + 1
    else:
        given = arguments["self"]
        dim = arguments.get("dim", None if operator in ("aten::argmax", "aten::argmin") else -1)
        count = given.numel() if dim is None or given.dim() == 0 else given.size(dim)
        if given.dim() != out.dim():
            dim = None  # it is gone
    turned = out if out.dim() == 0 or dim is None else out.movedim(dim, -1)
    turned.copy_(torch.arange(out.numel()).remainder_(max(count, 1)).view(turned.shape))
