"""What a test of allocators leaves behind: nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

import torch_uvm
from torch_uvm import _C


def _in_use() -> int:
    gc.collect()
    _C.release_idle_memory()
    return torch_uvm.memory_allocated()


@pytest.fixture(autouse=True)
def all_memory_comes_back() -> Iterator[None]:
    """Of tensors, and of what allocators keep and nobody uses; a module has it by importing it.

    A thread of autograd lets go of a graph's last node, and of the leaves that this holds, only after it
    has said that the graph is done.
    """
    before = _in_use()
    yield
    deadline = time.monotonic() + 10
    while (after := _in_use()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after <= before, f"{after - before} bytes are still in use"
