"""Values in a dry run: which tensors have them, and what the others are given where one is asked for.

Small tensors have values. Where an operator makes a small tensor from large ones, it is filled with a nominal
value, and what follows from that is computed. Large tensors have none: their memory is never written.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType

import torch
from torch import Tensor

#: Bytes of the largest storage with values.
SMALL = 64 << 10
#: Bytes beyond which memory of the host that a factory makes has no values.
LARGE_ON_HOST = 1 << 20

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

_STATE = "_torch_uvm_dry"  # an attribute of storages: which kind of no values they have
_NOMINAL = "nominal"
_VIRTUAL = "virtual"

#: Counts, of which a script may divide by one.
_COUNTS = ("aten::sum", "aten::count_nonzero", "aten::prod", "aten::numel")
_ALL = ("aten::all", "aten::equal")


def is_virtual(tensor: Tensor) -> bool:
    """Whether the memory of the tensor is never written."""
    if not tensor.is_cpu:
        return bool(tensor.untyped_storage().nbytes() > SMALL)
    return getattr(tensor.untyped_storage(), _STATE, None) is _VIRTUAL


def is_computed(tensor: Tensor) -> bool:
    """Whether the values are what a real run computes."""
    storage = tensor.untyped_storage()
    return not hasattr(storage, _STATE) and (tensor.is_cpu or storage.nbytes() <= SMALL)


def mark_virtual(tensor: Tensor) -> None:
    """Its memory is not to be written from now on."""
    setattr(tensor.untyped_storage(), _STATE, _VIRTUAL)


def mark_nominal(tensor: Tensor) -> None:
    """Its values follow from nominal ones."""
    storage = tensor.untyped_storage()
    if not hasattr(storage, _STATE):
        setattr(storage, _STATE, _NOMINAL)


def nominal(operator: str, dtype: torch.dtype, number: int = 0) -> float | int | bool:
    """The stand-in for a value that an operator computes from large tensors.

    Real numbers and counts are 1, so that scripts may divide by them and take their logarithms. Indices are
    0. Of booleans, `all` and `equal` are true and the others false: nothing is NaN, and tensors are equal.

    Args:
        number: which of the operator's results; the second one of `max` or `topk` is an index.
    """
    if dtype == torch.bool:
        return operator in _ALL
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0
    return 1 if operator in _COUNTS and number == 0 else 0


class StandIns:
    """Counts what a script got in place of values."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  #: by what and place
        self.values: dict[tuple[str, str], str] = {}

    def note(self, what: str, value: object) -> None:
        """The line of the script that runs now got ``value``."""
        key = what, place_here()
        self.counts[key] += 1
        if self.values.setdefault(key, str(value)) != str(value):
            self.values[key] = "various"


def place_here() -> str:
    """The innermost line outside torch and this package, as file:line; "" in a backward pass."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<frozen ", "<eval_with_key>")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
