"""Public names of torch_uvm/_tools/access_recording.py."""

from __future__ import annotations

from torch_uvm._tools.access_recording import AccessRecording

__all__ = ["AccessRecording"]
