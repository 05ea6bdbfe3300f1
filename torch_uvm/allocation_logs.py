"""Logs of allocations, as `torch_uvm.tools.record_allocations` and RMM write them (docs/annex.md).

A log may come from an untrusted source: a row that does not fit the format raises an error with its line
number. Pointers become numbers of allocations; the result has no addresses.
"""

from __future__ import annotations

from torch_uvm._tools.allocation_logs import AllocationLog, Event, read_log

__all__ = ["AllocationLog", "Event", "read_log"]
