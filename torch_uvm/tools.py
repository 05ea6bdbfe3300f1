"""Recordings of accesses and of allocations."""

from __future__ import annotations

from torch_uvm._tools.access_recording import AccessRecording, record_accesses
from torch_uvm._tools.allocation_recording import AllocationRecording, record_allocations

__all__ = ["AccessRecording", "AllocationRecording", "record_accesses", "record_allocations"]
