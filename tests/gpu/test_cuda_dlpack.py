"""DLPack's type 13 from another producer: 4 MiB allocated by CUDA without torch_uvm."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _cuda import MIB, busy, runtime
from _dlpack import MANAGED, Producer

import torch_uvm

Array = np.ndarray[Any, Any]


@pytest.fixture
def foreign() -> Iterator[Array]:
    """A million floats of managed memory, all 1. Freed after the test."""
    torch.cuda.init()
    pointer, attach_global = ctypes.c_void_p(), 1
    assert runtime().cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(4 * MIB), attach_global) == 0
    assert pointer.value is not None
    floats: Any = (ctypes.c_float * MIB).from_address(pointer.value)
    array = np.frombuffer(floats, np.float32)
    array[:] = 1
    yield array
    torch.cuda.synchronize()
    gc.collect()
    assert runtime().cudaFree(pointer) == 0


@pytest.mark.parametrize("version", [(1, 0), None])
def test_its_bytes_are_shared(foreign: Array, version: tuple[int, int] | None) -> None:
    producer = Producer(foreign.reshape(1024, 1024), device=(MANAGED, 0), version=version)
    x = torch_uvm.memory.from_dlpack(producer)
    assert (x.device, x.shape, x.data_ptr()) == (torch.device("cuda:0"), (1024, 1024), foreign.ctypes.data)
    assert not torch_uvm.is_managed(x), "the bytes are the producer's"
    x.mul_(3)
    torch.cuda.synchronize()
    assert float(foreign.sum()) == 3 * MIB
    foreign[:] = 2
    assert x.sum().item() == 2 * MIB


def test_the_producer_gets_them_back_after_queued_work(foreign: Array) -> None:
    seen: list[float] = []

    class Watching(Producer):
        def _delete(self, pointer: int) -> None:
            super()._delete(pointer)
            seen.append(float(self.array.sum()))

    for turn in range(3):
        producer = Watching(foreign, device=(MANAGED, 0))
        x = torch_uvm.memory.from_dlpack(producer)
        busy()
        x.fill_(turn)
        del x
        gc.collect()
        assert producer.deleted == 1 and seen[turn] == turn * MIB
