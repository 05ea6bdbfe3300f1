"""Compiled graphs made by hand, and storages under a small budget.

Inductor has no kernels for the emulated accelerator. The calls are inductor's own (`CompiledFxGraph`). The
kernel reads the addresses of its inputs once, as Triton's launcher does, and uses them later.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # imports all that a call of CompiledFxGraph needs
from torch._inductor.output_code import CompiledFxGraph

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
BUDGET = 8 * MIB
DEVICE = torch.device("emu", 0)
N = MIB // 4  # elements of a storage of 1 MiB
Kernel = Callable[[list[Any]], Any]


@pytest.fixture(autouse=True)
def small_budget() -> Iterator[None]:
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.enable(budget=BUDGET)
    torch_uvm.memory.reset_residency_stats()
    yield
    gc.collect()
    _C.request_budget(None, None)
    torch_uvm.memory.empty_cache()


def address(x: torch.Tensor) -> int:
    """The address as C++ reads it, without a pointer escape."""
    return torch._C.TensorBase.data_ptr(x)


def floats(at: int, count: int = N) -> Any:
    """Elements at an address, for a kernel. Waits for queued work first."""
    torch.accelerator.synchronize()
    return (ctypes.c_float * count).from_address(at)


def graph(kernel: Kernel, written: Sequence[int] = (), backward: bool = False) -> CompiledFxGraph:
    """A compiled graph that runs `kernel` and declares that it writes to the inputs `written`."""
    made = object.__new__(CompiledFxGraph)
    made.current_callable = kernel
    made.compiled_fn_runner = None
    made.mutated_input_idxs = torch.utils._ordered_set.OrderedSet(written)
    made.fx_kwargs = {"is_backward": backward}
    return made


def storages(count: int = 12) -> list[torch.Tensor]:
    """Storages beyond the budget, each full of its number. On the device they have a clean host copy."""
    made = [torch.full((N,), float(number), device=DEVICE) for number in range(count)]
    for _ in range(2):
        for each in made:
            each.sum()
    return made


def use(tensors: list[torch.Tensor]) -> None:
    """Brings the tensors to the device one by one, which evicts others."""
    for each in tensors:
        each.sum()


def on_host(x: torch.Tensor) -> bool:
    return torch.device("cpu") in torch_uvm.residency(x)
