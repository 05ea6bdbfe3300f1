"""Traces of accesses, as `torch_uvm.tools.record_accesses` writes them.

The format is JSON lines, described in ``docs/annex.md``. A trace may come from an untrusted source: reading
it runs nothing, and a line that does not fit the format raises an error with its number.
"""

from __future__ import annotations

from torch_uvm._tools.access_traces import (
    Operator,
    OperatorGroup,
    Resident,
    Storage,
    Trace,
    Transfer,
    read_trace,
)

__all__ = ["Operator", "OperatorGroup", "Resident", "Storage", "Trace", "Transfer", "read_trace"]
