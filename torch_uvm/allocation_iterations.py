"""The iterations of the loop that a log of allocations was recorded from.

A log has no marks, because programs that read RMM's logs would not accept them. A loop is recognised by
repetition: its iterations make the same requests, in size and stream, and each free comes as many rows after
its allocation. Where sizes vary, they are left out of the comparison. For a loop without such repetition the
caller says how many iterations there are.
"""

from __future__ import annotations

from torch_uvm._tools.iterations import Iterations, find, split_evenly

__all__ = ["Iterations", "find", "split_evenly"]
