"""Public names of torch_uvm/_tools/allocation_recording.py."""

from __future__ import annotations

from torch_uvm._tools.allocation_recording import AllocationRecording

__all__ = ["AllocationRecording"]
