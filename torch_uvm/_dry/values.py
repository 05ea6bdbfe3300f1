"""Values in a dry run: which tensors have them, and what the others are given where one is asked for.

Small tensors have values, and so have integers and masks of moderate size, which decide shapes. Where an
operator makes such a tensor from one without values, it is filled with plausible ones (`plausible.py`), and
what follows from them is computed. Other tensors have none: their memory is never written.
"""

from __future__ import annotations

import mmap
from collections import Counter

import torch
from torch import Tensor

from torch_uvm._dry.results import New
from torch_uvm._util.frames import place_here

#: Bytes of the largest storage with values.
SMALL = 64 << 10
#: The same of a tensor of integers or booleans.
SMALL_INTEGERS = 16 << 20
#: Bytes beyond which memory of the host that a factory makes has no values.
LARGE_ON_HOST = 1 << 20

_STATE = "_torch_uvm_dry"  # an attribute of storages: which kind of no values they have
_NOMINAL = "nominal"
_VIRTUAL = "virtual"
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on
_WRITTEN = "_torch_uvm_written"  # an attribute of storages beyond `SMALL` that have values


def can_have_values(bytes: int, dtype: torch.dtype, most: int = SMALL) -> bool:
    """Whether a new tensor of this size gets values.

    Args:
        most: bytes of the largest one of real numbers.
    """
    is_real = dtype.is_floating_point or dtype.is_complex
    return bytes <= (most if is_real else SMALL_INTEGERS)


def is_virtual(tensor: Tensor) -> bool:
    """Whether the memory of the tensor is never written."""
    storage = tensor.untyped_storage()
    if tensor.is_cpu:
        return getattr(storage, _STATE, None) is _VIRTUAL
    return bool(storage.nbytes() > SMALL) and not hasattr(storage, _WRITTEN)


def is_computed(tensor: Tensor) -> bool:
    """Whether the values are what a real run computes."""
    return not hasattr(tensor.untyped_storage(), _STATE) and not is_virtual(tensor)


def reserved(new: New) -> Tensor:
    """Such a tensor on the CPU, of zeros, marked as virtual. Pages take no memory until they are written."""
    memory = mmap.mmap(-1, new.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=new.dtype).set_(storage, 0, new.size, new.stride)
    setattr(storage, _STATE, _VIRTUAL)
    return tensor


def mark_written(tensor: Tensor) -> None:
    """It has values, however large it is."""
    storage = tensor.untyped_storage()
    if not tensor.is_cpu and storage.nbytes() > SMALL:
        setattr(storage, _WRITTEN, True)


def mark_nominal(tensor: Tensor) -> None:
    """Its values follow from plausible ones."""
    storage = tensor.untyped_storage()
    if not hasattr(storage, _STATE):
        setattr(storage, _STATE, _NOMINAL)


class StandIns:
    """Counts what a script got in place of values."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  #: by what and place
        self.values: dict[tuple[str, str], str] = {}

    def note(self, what: str, value: object) -> tuple[str, str]:
        """The line of the script that runs now got ``value``. Returns the key of the stand-in."""
        key = what, place_here()
        self.counts[key] += 1
        if self.values.setdefault(key, str(value)) != str(value):
            self.values[key] = "various"
        return key
