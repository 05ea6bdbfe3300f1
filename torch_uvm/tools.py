"""Recordings of accesses and of allocations."""

from __future__ import annotations

from torch_uvm._tools.recording import (
    AccessRecording,
    AllocationRecording,
    record_accesses,
    record_allocations,
)

__all__ = ["AccessRecording", "AllocationRecording", "record_accesses", "record_allocations"]
