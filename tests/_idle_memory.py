"""What a test of allocators leaves behind: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import torch_uvm
from torch_uvm import _C


@pytest.fixture(autouse=True)
def all_memory_comes_back() -> Iterator[None]:
    """Of tensors, and of what allocators keep and nobody uses; a module has it by importing it."""
    gc.collect()
    _C.release_idle_memory()
    before = torch_uvm.memory_allocated()
    yield
    gc.collect()
    _C.release_idle_memory()
    assert torch_uvm.memory_allocated() == before
