"""Tensors, checks and a clean-up for tests in which each call of the runtime fails once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
BUDGET = 8 * MIB
names = (f"faults {number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    _C.emu_clear_failures()  # left over from a failed test
    torch_uvm.enable(budget=None, optimizer="in_place")
    torch_uvm.disable()
    torch_uvm.memory.empty_cache()


def filled(count: int, value: float, device: str = "emu") -> torch.Tensor:
    return torch.full((count,), value, device=device)


def is_all(x: torch.Tensor, value: float) -> bool:
    """Compares the bytes on the host, because an operator on the device may fail half-way."""
    return bool((x.cpu() == value).all())
