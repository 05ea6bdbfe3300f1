"""Public names of torch_uvm/_allocators/arena.py."""

from __future__ import annotations

from torch_uvm._allocators.arena import Arena, Outlived

__all__ = ["Arena", "Outlived"]
