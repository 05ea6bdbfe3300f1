"""Public names of torch_uvm/_allocators/plan.py."""

from __future__ import annotations

from torch_uvm._allocators.plan import AllocationPlan

__all__ = ["AllocationPlan"]
