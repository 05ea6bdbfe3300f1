"""A fixture that checks that tests of allocators leave no memory in use."""

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
    return torch_uvm.memory.memory_allocated()


@pytest.fixture(autouse=True)
def all_memory_comes_back() -> Iterator[None]:
    """Every byte in use at the end was in use before. Covers tensors and idle memory of allocators. A module
    gets this fixture by importing it.

    Waits, because an autograd thread releases a graph's last node, and the leaves that the node holds, after
    it has reported the end of backward.
    """
    before = _in_use()
    yield
    deadline = time.monotonic() + 10
    while (after := _in_use()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after <= before, f"{after - before} bytes are still in use"
