"""Allocators beside the process's own (docs/annex.md)."""

from __future__ import annotations

from torch_uvm._allocators.allocator import Allocator, CountingAllocator, LoggingAllocator, use_allocator
from torch_uvm._allocators.arena import Arena, Outlived, arena
from torch_uvm._allocators.mem_pool import mem_pool
from torch_uvm._allocators.plan import AllocationPlan, allocation_plan

__all__ = [
    "AllocationPlan",
    "Allocator",
    "Arena",
    "CountingAllocator",
    "LoggingAllocator",
    "Outlived",
    "allocation_plan",
    "arena",
    "mem_pool",
    "use_allocator",
]
