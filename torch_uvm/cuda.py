"""CUDA: when our allocator takes its place in PyTorch, and managed memory for MemPools.

Importing torch_uvm initialises nothing. The allocator goes in when CUDA is initialised, or at once where it
is already, and stays: with the switch off it hands everything to the one that was there before.
"""

from __future__ import annotations

import functools
import threading

import torch

from torch_uvm import _C
from torch_uvm.arguments import exact_keywords

_lock = threading.Lock()
_expected = False  # whether the allocator is in place, or will be when CUDA is initialised


def is_here() -> bool:
    """Whether there is a GPU, without initialising CUDA: a process may fork before it does so."""
    return torch.cuda.device_count() > 0


def expect() -> None:
    """Has the allocator put in place now, or, where CUDA is not initialised yet, as soon as it is."""
    global _expected
    with _lock:
        if not _expected:
            torch.cuda._lazy_call(_C.cuda_install)
            _expected = True


@functools.lru_cache(maxsize=1)
def _allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    # Kept: a pool may outlive whoever asked for it, and holds the functions, not this object.
    return torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "torch_uvm_malloc", "torch_uvm_free")


@exact_keywords
def mem_pool() -> torch.cuda.MemPool:
    """A `torch.cuda.MemPool` of managed memory, for `torch.cuda.use_mem_pool`.

    Its segments are managed memory under the limit, whatever the switch says. To PyTorch they are memory
    of its own, and so they are in torch.cuda's statistics, not in torch_uvm's; `is_managed` is False for
    tensors made in the pool, and they are copied, not moved. `use_mem_pool` holds for the thread that
    enters it: gradients, which backward threads make, are not in the pool. `enabled` reaches them, too.

    Raises:
        RuntimeError: CUDA is not this process's accelerator.
        torch.OutOfMemoryError: at an allocation in the pool, past the limit.

    >>> with torch.cuda.use_mem_pool(torch_uvm.mem_pool()):
    ...     x = torch.ones(1024, device="cuda")
    """
    if _C.backend() != "cuda":
        raise RuntimeError(
            f"mem_pool() makes pools of CUDA memory, and the backend of torch_uvm is {_C.backend()!r} here"
        )
    torch.cuda.init()
    expect()
    return torch.cuda.MemPool(_allocator().allocator())
