"""Managed tensors made directly, memory in numbers, and limits as they stand."""

from __future__ import annotations

from torch_uvm._allocators.statistics import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_fragmentation,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from torch_uvm._residency.budget import reset_residency_stats
from torch_uvm._residency.limits import get_host_limit, get_limit
from torch_uvm._residency.pins import Kept
from torch_uvm._tensors.dlpack import from_dlpack
from torch_uvm._tensors.factories import empty, empty_like, full, ones, zeros

__all__ = [
    "Kept",
    "empty",
    "empty_cache",
    "empty_like",
    "from_dlpack",
    "full",
    "get_host_limit",
    "get_limit",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_fragmentation",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "ones",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "reset_residency_stats",
    "zeros",
]
