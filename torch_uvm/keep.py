"""Public names of torch_uvm/_residency/pins.py."""

from __future__ import annotations

from torch_uvm._residency.pins import Kept

__all__ = ["Kept"]
