"""Pages, homes and advice of managed tensors, and tensors that are neighbours in a segment."""

from __future__ import annotations

from typing import Any

import torch

import torch_uvm
from torch_uvm import _C

PAGE = 65536
MIB = 2**20


def attributes(t: torch.Tensor) -> dict[str, Any]:
    """The attributes of all pages that contain bytes of the tensor's block."""
    address, count, _ = _C.block_of(t) or (0, 0, 0)
    return _C.range_attributes(address, count)


def advice(t: torch.Tensor) -> tuple[Any, ...]:
    found = attributes(t)
    assert found["uniform"]
    return found["read_mostly"], found["preferred_location"], found["accessed_by"]


NO_ADVICE: tuple[Any, ...] = (False, None, [])


def home(t: torch.Tensor) -> int:
    return (_C.block_of(t) or (0, 0, -9))[2]


def page_bytes() -> int:
    """The granularity of hints: the emulator's pages are 64 KiB, a GPU's up to 2 MiB."""
    bytes_of_a_page: int = _C.device_properties(0)["page_bytes"]
    return bytes_of_a_page


def neighbours(count: int, each: int) -> list[torch.Tensor]:
    """Adjacent tensors of `each` bytes in one segment, resident on the device."""
    torch_uvm.memory.empty_cache()
    made = [torch_uvm.memory.ones(each, dtype=torch.uint8) for _ in range(12)]
    made.sort(key=torch.Tensor.data_ptr)
    starts = {s["address"] for s in torch_uvm.memory.memory_snapshot()}
    for first in range(len(made) - count + 1):
        run = made[first : first + count]
        step = [b.data_ptr() - a.data_ptr() for a, b in zip(run, run[1:], strict=False)]
        if all(s == each for s in step) and not any(t.data_ptr() in starts for t in run[1:]):
            return run
    raise AssertionError("no neighbours")
