"""`mem_get_info`: what managed tensors can still have, and in all."""

from __future__ import annotations

from torch_uvm import _C
from torch_uvm._residency.budget import device_with_a_budget
from torch_uvm._residency.limits import get_host_limit
from torch_uvm._util.arguments import Device, exact_keywords, resolve_device
from torch_uvm._util.runtime import check_runtime, known_bytes


def _least(*counts: int | None) -> int | None:
    known = [max(count, 0) for count in counts if count is not None]
    return min(known) if known else None


@exact_keywords
def mem_get_info(device: Device | None = None) -> tuple[int, int]:
    """The memory that managed tensors of a device can still have, and that they can have in all.

    It has the form of torch.cuda.mem_get_info, but does not describe the card: managed tensors may use memory
    beyond it, and these figures include that memory.

    - With a budget: what is left of the budget, and what may still be pinned on the host for tensors off
      their device.
    - Without one, or where the device has one memory with the host: what is left of the limit, or what the
      host has available (Linux's MemAvailable, which counts page cache that can be dropped as free).

    Use it to ask whether something fits. A program that takes a share of the free memory should take it of
    `get_budget()` or of torch.accelerator.get_memory_info: a share of these figures is a share of the host's
    memory. They are a snapshot, those of several devices overlap, and one tensor of all that is free need
    not fit.

    Args:
        device: as that of `get_budget`, and so are the errors.

    Returns:
        (free, total) in bytes. `total - free` is what this process's managed tensors use: without a budget
        those of all devices; with one those on the device, and what is pinned for tensors off any device.

    >>> torch_uvm.set_limit("1GiB")
    >>> x = torch_uvm.memory.empty(1 << 20, device=torch.accelerator.current_accelerator())
    >>> free, total = torch_uvm.mem_get_info()
    >>> free <= total - x.nbytes
    True
    """
    check_runtime("mem_get_info()", now=True)
    index = device_with_a_budget(device)
    properties = _C.device_properties(index)
    # Over all homes: a block counts for the home that used it last, its segment for the one it was made for.
    everywhere = _C.memory_stats(None)
    allocated = everywhere["allocated_bytes.all.current"]
    cached = everywhere["reserved_bytes.all.current"] - allocated
    limit = _C.get_limit()
    left = None if limit is None else limit - _C.managed_bytes()
    one_memory = properties["one_memory"]
    available = known_bytes(properties["free_memory"] if one_memory else _C.host_memory_available())
    budget = _C.budget_of(index)
    if budget is None:
        new = _least(left, available)
        free = cached + (properties["free_memory"] if new is None else new)
        return free, free + allocated
    allocated = _C.memory_stats(resolve_device(index))["allocated_bytes.all.current"]
    pinned = _C.residency_stats()["host_bytes"]
    host_limit = get_host_limit()
    on_host = _least(None if host_limit is None else host_limit - pinned, available) or 0
    on_device = _least(budget - allocated, None if left is None else max(left, 0) + cached) or 0
    free = on_device + on_host
    return free, free + allocated + pinned
