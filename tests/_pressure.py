"""A small hard budget, and pressure on it: tensors that evict others."""

from __future__ import annotations

import random

import pytest
import torch

import torch_uvm

MIB = 1024**2
SMALL = 8 * MIB


@pytest.fixture(name="budget")
def small_hard_budget() -> int:
    """A hard budget of 8 MiB on a device of 256 MiB, with managed memory on."""
    torch_uvm.memory.empty_cache()
    torch_uvm.enable(budget=SMALL)
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.memory.reset_residency_stats()
    return SMALL


_some = random.Random(0)


def press(rounds: int = 2) -> None:
    """Uses three times the budget repeatedly, so that every movable storage is evicted.

    The operators are random: the schedule of an earlier test must not match and choose other evictions.
    """
    others = [torch.ones(MIB // 2, device="emu") for _ in range(3 * SMALL // (2 * MIB))]
    for _ in range(rounds):
        for other in others:
            _some.choice((other.add_, other.sub_, other.mul_, other.div_))(1)


def is_on_device(x: torch.Tensor) -> bool:
    return torch_uvm.residency(x) == {torch.device("emu:0"): x.untyped_storage().nbytes()}


def leaves(x: torch.Tensor) -> bool:
    """Whether `x` is evicted under pressure. The engine chooses the order of evictions."""
    for _ in range(5):
        press()
        if not is_on_device(x):
            return True
    return False


def is_on_device_of(x: torch.Tensor, size: int) -> bool:
    return torch_uvm.residency(x) == {torch.device("emu:0"): size}
