"""Tensors of the host whose memory is reserved and never committed."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_uvm._dry.values import mark_virtual

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on


def reserved(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, bytes: int) -> Tensor:
    """A tensor on the CPU of zeros, marked as virtual. Pages take no memory until they are written.

    Args:
        bytes: of its storage; at least 1.
    """
    memory = mmap.mmap(-1, bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))
    mark_virtual(tensor)
    return tensor
