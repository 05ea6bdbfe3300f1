"""Public names of torch_uvm/_allocators/allocator.py."""

from __future__ import annotations

from torch_uvm._allocators.allocator import CountingAllocator, LoggingAllocator

__all__ = ["CountingAllocator", "LoggingAllocator"]
