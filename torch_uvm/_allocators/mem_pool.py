"""Managed memory for `torch.cuda.MemPool`."""

from __future__ import annotations

import functools

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import exact_keywords
from torch_uvm._util.runtime import expect_cuda


@functools.lru_cache(maxsize=1)
def _allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    # Never freed: a pool holds the functions, not this object, and may outlive its creator.
    return torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "torch_uvm_malloc", "torch_uvm_free")


@exact_keywords
def mem_pool() -> torch.cuda.MemPool:
    """A `torch.cuda.MemPool` of managed memory, for `torch.cuda.use_mem_pool`.

    Its segments are managed memory and count towards the limit, whether the switch is on or off. PyTorch
    treats them as its own memory: they appear in torch.cuda's statistics, not in torch_uvm's; `is_managed`
    is False for tensors made in the pool, and such tensors are copied, not moved. `use_mem_pool` holds for
    the thread that enters it. Backward threads make the gradients, so gradients are not in the pool;
    `enabled` includes them.

    Raises:
        RuntimeError: CUDA is not this process's accelerator.
        torch.OutOfMemoryError: at an allocation in the pool that would exceed the limit.

    >>> with torch.cuda.use_mem_pool(torch_uvm.allocators.mem_pool()):
    ...     x = torch.ones(1024, device="cuda")
    """
    if _C.backend() != "cuda":
        raise RuntimeError(
            f"mem_pool() makes pools of CUDA memory, and the backend of torch_uvm is {_C.backend()!r} here"
        )
    torch.cuda.init()
    expect_cuda()
    return torch.cuda.MemPool(_allocator().allocator())
