"""Counters and pages of the emulator, for tests of hints. Tests that use them do not run on CUDA."""

from __future__ import annotations

import pytest
import torch

import torch_uvm
from torch_uvm import emulated, prefetch


def calls(name: str) -> int:
    return emulated.counters()[f"{name}_calls"]


def on_host(count: int) -> torch.Tensor:
    """Managed bytes on the host. A prefetch moves the pages, as the emulator does not see host writes."""
    x = torch_uvm.memory.empty(count, dtype=torch.uint8, device="cpu").fill_(1)
    prefetch(x, "cpu")
    emulated.reset_counters()
    return x


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    torch_uvm.memory.empty(1)  # creates the accelerator
    emulated.reset_counters()
