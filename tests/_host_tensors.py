"""Managed CPU tensors: a fixture that switches them on, and a prelude for other processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import torch_uvm

ACCELERATOR = torch.accelerator.current_accelerator()
assert ACCELERATOR is not None
DEVICE = ACCELERATOR.type
MIB = 1024**2

PRELUDE = """
import os, sys, threading
import torch, torch_uvm
torch_uvm.enable(host_tensors=True)
"""


@pytest.fixture(autouse=True)
def host_tensors_on() -> Iterator[None]:
    gc.collect()
    torch_uvm.memory.empty_cache()
    torch_uvm.enable(host_tensors=True)
    yield
    torch_uvm.enable(host_tensors=False)


def host_bytes() -> int:
    return torch_uvm.memory.memory_allocated("cpu")
