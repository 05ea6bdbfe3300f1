"""Replays of a log of allocations on an allocator of one's choice (docs/annex.md)."""

from __future__ import annotations

from torch_uvm._tools.replay import Replay, allocators, replay

__all__ = ["Replay", "allocators", "replay"]
