"""Allocation plans: an iteration's memory is laid out once; later requests are served by index."""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._allocators.allocator import ScopedAllocator, device_of
from torch_uvm._util.arguments import Device, exact_keywords, show

_lock = threading.Lock()
_plans: dict[tuple[str, torch.device], AllocationPlan] = {}


class AllocationPlan(ScopedAllocator):
    """What `allocation_plan` returns: an allocator, and a context manager around an iteration."""

    handle: _C.AllocationPlan

    def __init__(self, handle: _C.AllocationPlan, name: str) -> None:
        super().__init__(handle)
        self.name = name

    def report(self) -> dict[str, Any]:
        """How well the plan fits, and its layout.

        `iterations` that ended, `plans` that were made, `hits` and `misses` of requests, and `outlived`:
        planned allocations that were not freed in their iteration. Of the plan for the next iteration:
        `requests`, of which `planned_requests` have a place in its `planned_bytes`; `peak_live_bytes`, the
        lower bound of any layout; and `layout`: (offset, bytes, begin, end) of each planned request, where
        begin and end are positions in the sequence of all allocations and frees.
        """
        report = self.handle.report()
        layout = report["layout"]
        changes = [change for _, n, begin, end in layout for change in ((begin, n), (end, -n))]
        live = accumulate(change for _, change in sorted(changes))
        return report | {"planned_requests": len(layout), "peak_live_bytes": max(live, default=0)}

    def _begin(self) -> None:
        self.handle.begin_iteration()

    def _end(self) -> None:
        self.handle.end_iteration()

    def __repr__(self) -> str:
        return f"torch_uvm.allocators.allocation_plan({self.name!r})"


@exact_keywords
def allocation_plan(name: str, *, device: Device | None = None) -> AllocationPlan:
    """The plan of that name: a scope around an iteration, whose allocations it records the first time.

    From the second iteration on, a request gets the place that its index has in one block of memory, laid
    out so that allocations that live at the same time share no byte. That takes no search and no driver
    call. A request that differs is allocated as without a plan, and the plan is made anew after the
    iteration. Allocations that outlive the iteration, or are of another stream than the first, are not in the
    block. The same name is the same plan, for the life of the process. Iterations of different kinds,
    such as training and evaluation, need a name each.

    Args:
        name: one for each kind of iteration.
        device: the home of the planned memory; None for the current accelerator.

    Raises:
        TypeError, ValueError: a value that is not accepted; on entry, an iteration of this plan is open.
        RuntimeError: there is no managed memory on this machine.

    >>> for _ in range(3):
    ...     with torch_uvm.allocators.allocation_plan("doubling") as plan:
    ...         x = torch.ones(256, device=torch.accelerator.current_accelerator())
    ...         del x
    >>> plan.report()["hits"]
    2
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name is {show(name)}; accepted: a string that is not empty")
    home = device_of(device, "allocation_plan()")
    with _lock:
        if (name, home) not in _plans:
            handle = _C.AllocationPlan(_C.process_allocator(), home)
            _plans[name, home] = AllocationPlan(handle, name)
        return _plans[name, home]
