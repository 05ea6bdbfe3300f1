"""Statistics of managed memory, with the names and keys of torch.cuda's.

`device` selects the home: None for all homes together, a device (a torch.device, a string, or the
accelerator's index), or "cpu" for the host. A block counts for the home that used it last, so the numbers of
one home say who uses memory, not where its pages are now. Peaks over all homes are peaks of the sum, not
sums of peaks.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._residency.budget import device_with_a_budget
from torch_uvm._residency.limits import get_host_limit
from torch_uvm._util.arguments import Device, accelerator, exact_keywords, resolve_device, resolve_home
from torch_uvm._util.runtime import check_runtime, known_bytes

_MIB = 1 << 20
#: A row of the fragmentation has the free pieces of at least this size, and smaller than the next row's.
_LEAST = (0, 64 << 10, _MIB, 8 * _MIB, 32 * _MIB, 128 * _MIB, 1024 * _MIB)


@exact_keywords
def memory_stats(device: Device | None = None) -> dict[str, int]:
    """The counters of the managed allocator, flat, with the keys of torch.cuda.memory_stats.

    Levels are "<what>.<pool>.<figure>". "what" is allocation, segment, active, inactive_split (counts),
    allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes or requested_bytes; "pool" is all,
    small_pool or large_pool; "figure" is current, peak, allocated or freed. Counts are num_alloc_retries,
    num_ooms, num_sync_all_streams, num_device_alloc, num_device_free, num_events_recorded, num_host_waits,
    num_populate_failures (new segments whose prefetch failed) and num_over_cap (segments made beyond their
    device's budget).

    Args:
        device: the home: a device, the accelerator's index, "cpu" for the host; None for all homes together.

    Raises:
        TypeError, ValueError: an unknown device or index.
    """
    return _C.memory_stats(resolve_home(device))


def _level(device: Device | None, what: str, figure: str) -> int:
    return _C.memory_stats(resolve_home(device))[f"{what}.all.{figure}"]


@exact_keywords
def memory_allocated(device: Device | None = None) -> int:
    """Bytes of managed blocks that tensors hold now; arguments and errors as those of `memory_stats`.

    >>> torch_uvm.memory.memory_allocated()
    0
    """
    return _level(device, "allocated_bytes", "current")


@exact_keywords
def max_memory_allocated(device: Device | None = None) -> int:
    """The most bytes of managed blocks that tensors held since the last `reset_peak_memory_stats`.

    Arguments and errors as those of `memory_stats`.
    """
    return _level(device, "allocated_bytes", "peak")


@exact_keywords
def memory_reserved(device: Device | None = None) -> int:
    """Bytes of managed segments: in use by tensors, or cached for later ones.

    `set_limit` bounds the sum over all homes. Arguments and errors as those of `memory_stats`.
    """
    return _level(device, "reserved_bytes", "current")


@exact_keywords
def max_memory_reserved(device: Device | None = None) -> int:
    """The most bytes of managed segments since the last `reset_peak_memory_stats`.

    Arguments and errors as those of `memory_stats`.
    """
    return _level(device, "reserved_bytes", "peak")


def _reset_homes(device: Device | None) -> list[torch.device | None]:
    if device is not None:
        return [resolve_home(device)]
    here = accelerator()
    count = 0 if here is None else torch.accelerator.device_count()
    return [None, *map(resolve_home, ["cpu", *range(count)])]


@exact_keywords
def reset_peak_memory_stats(device: Device | None = None) -> None:
    """Sets the peaks to the current levels; arguments and errors as those of `memory_stats`.

    `device` None: of every home and of their sum.
    """
    for home in _reset_homes(device):
        _C.reset_peak_memory_stats(home)


@exact_keywords
def reset_accumulated_memory_stats(device: Device | None = None) -> None:
    """Sets the sums ("allocated", "freed") and the counts to 0; levels and peaks stay.

    `device` None: of every home and of their sum. Arguments and errors as those of `memory_stats`.
    """
    for home in _reset_homes(device):
        _C.reset_accumulated_memory_stats(home)


@exact_keywords
def empty_cache() -> int:
    """Releases every managed segment that no tensor uses, after waiting for pending frees.

    Returns:
        the bytes released
    """
    return _C.empty_cache()


@exact_keywords
def memory_snapshot(device: Device | None = None) -> list[dict[str, Any]]:
    """Every managed segment with its blocks, in address order, in the form of torch.cuda.memory_snapshot.

    PyTorch's viewer of snapshots (torch.cuda._memory_viz, pytorch.org/memory_viz) accepts ``{"segments": it,
    "device_traces": []}``. In place of a stack, blocks name their home.

    Args:
        device: only the segments made for that home; a block in one may have another home by now. None for
            all of them.

    Raises:
        TypeError, ValueError: an unknown device or index.
    """
    place = _place(device)
    return [_for_viewers(it) for it in _C.memory_snapshot() if place in (None, it["device"])]


def _place(device: Device | None) -> int | None:
    """A home as snapshots have it: -1 is the host. None: all homes."""
    home = resolve_home(device)
    if home is None:
        return None
    return -1 if home.type == "cpu" else home.index


def _for_viewers(segment: dict[str, Any]) -> dict[str, Any]:
    """A segment with the keys that PyTorch's viewer reads and ours lack: a stream, and a stack."""
    home = "the host" if segment["device"] < 0 else f"device {segment['device']}"
    frames = [{"name": f"managed memory, made for {home}", "filename": "torch_uvm", "line": 0}]
    return segment | {
        "stream": segment["blocks"][0]["stream"] if segment["blocks"] else 0,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [block | {"frames": frames} for block in segment["blocks"]],
    }


def _pieces_table(found: dict[str, Any]) -> str:
    rows = [(key, count, "") for key, count in found.items() if key.endswith("_bytes")]
    for it in found["pieces"]:
        if it["count"]:
            least = _C.format_bytes(it["least_bytes"])
            rows.append((f"  pieces from {least}", it["bytes"], f"  in {it['count']}"))
    return "".join(f"{name:<29}{_C.format_bytes(count):>14}{more}\n" for name, count, more in rows)


@exact_keywords
def memory_fragmentation(device: Device | None = None) -> dict[str, Any]:
    """How the free managed memory is fragmented: why a request may not fit.

    A block counts for the home that it is filed under, a segment for the one that it was made for. Arguments
    and errors as those of `memory_stats`.

    Returns:
        a dictionary. Bytes are "reserved_bytes" (of segments made for `device`), "allocated_bytes",
        "requested_bytes", "rounding_bytes" (allocated beyond what was requested), "pending_bytes" (freed,
        but still in use by a stream), "free_bytes", and of these "inactive_split_bytes" (in segments partly
        in use), "unused_segment_bytes" (which `empty_cache` releases) and "largest_free_bytes" (in one
        piece). "share_outside_largest" is a share of the free bytes, from 0 to 1. "pieces" is a list of
        {"least_bytes", "count", "bytes"} for the free pieces of at least that size and below the next
        entry's. "table" is all of it as text.
    """
    place = _place(device)
    segments = _C.memory_snapshot()
    blocks = [
        (block, segment["active_size"] == 0)
        for segment in segments
        for block in segment["blocks"]
        if place in (None, block["device"])
    ]
    allocated = [block for block, _ in blocks if block["state"] == "active_allocated"]
    free = [(block["size"], unused) for block, unused in blocks if block["state"] == "inactive"]
    rows = [[size for size, _ in free if size >= least] for least in _LEAST]
    sizes = sum(block["size"] for block in allocated)
    total, largest = sum(size for size, _ in free), max((size for size, _ in free), default=0)
    requested = sum(block["requested_size"] for block in allocated)
    above = [*rows[1:], []]
    found: dict[str, Any] = {
        "reserved_bytes": sum(s["total_size"] for s in segments if place in (None, s["device"])),
        "allocated_bytes": sizes,
        "requested_bytes": requested,
        "rounding_bytes": sizes - requested,
        "pending_bytes": sum(block["size"] for block, _ in blocks) - sizes - total,
        "free_bytes": total,
        "inactive_split_bytes": sum(size for size, unused in free if not unused),
        "unused_segment_bytes": sum(size for size, unused in free if unused),
        "largest_free_bytes": largest,
        "share_outside_largest": 1 - largest / total if total else 0.0,
        "pieces": [
            {"least_bytes": least, "count": len(own) - len(more), "bytes": sum(own) - sum(more)}
            for least, own, more in zip(_LEAST, rows, above, strict=True)
        ],
    }
    return found | {"table": _pieces_table(found)}


#: Rows of `memory_summary`: keys of `memory_stats`, and of `stats`.
_LEVELS = (
    *("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes"),
    *("allocation", "active", "segment", "inactive_split"),
)
_TRANSFERS = ("fetched", "written_back", "dropped_clean", "used_in_place")


def _budget_line(index: int, peaks: dict[int, int], now: dict[int, int]) -> str:
    """The budget in force on a device, or the one requested, which its first managed memory puts in force."""
    budget, asked = _C.budget(index), _C.requested_budget(index)
    if budget is None:
        figure = "none" if asked in (None, "none") else f"{asked}, from its first managed memory on"
    else:
        reserved, peak = (_C.format_bytes(it.get(index, 0)) for it in (now, peaks))
        figure = f"{_C.format_bytes(budget)} (requested: {asked}); reserved {reserved}, peak {peak}"
    return f"budget of device {index}: {figure}"


def _residency_lines(home: torch.device | None) -> list[str]:
    """Budgets, pinned host memory and transfers. The last two are the process's, whatever the home."""
    here = accelerator()
    count = 0 if here is None or _C.backend() == "none" else torch.accelerator.device_count()
    stats = _C.residency_stats()
    devices = range(count) if home is None or home.type == "cpu" else [home.index]
    host_limit = get_host_limit()
    limit = "none" if host_limit is None else _C.format_bytes(host_limit)
    lines = [_budget_line(index, stats["peak_device_bytes"], stats["device_bytes"]) for index in devices]
    lines += [
        f"pinned host memory: {_C.format_bytes(stats['host_bytes'])}; host limit: {limit}",
        f"{'transfers':<29}{'count':>12}{'bytes':>14}{'ms':>14}",
    ]
    for key in _TRANSFERS:
        it = stats[key]
        lines.append(f"  {key:<27}{it['count']:>12}{_C.format_bytes(it['bytes']):>14}{it['ms']:>14.1f}")
    lines.append(f"  {'over_budget':<27}{stats['over_budget']:>12}")
    return lines


@exact_keywords
def memory_summary(device: Device | None = None, abbreviated: bool = False) -> str:
    """The statistics as a table to read: memory, then budgets, pinned host memory and transfers.

    Pinned host memory and transfers are the process's, whatever `device` is (`stats`). Other arguments and
    errors as those of `memory_stats`.

    Args:
        abbreviated: without the fragmentation.
    """
    home = resolve_home(device)
    stats = _C.memory_stats(home)
    limit = _C.get_limit()
    whose = "all homes" if home is None else ("host" if home.type == "cpu" else str(home))
    rule = "-" * 79
    lines = [
        rule,
        f"torch_uvm managed memory, {whose}; limit: {'none' if limit is None else _C.format_bytes(limit)}",
        f"out of memory: {stats['num_ooms']}   retries: {stats['num_alloc_retries']}   "
        f"events: {stats['num_events_recorded']}   host waits: {stats['num_host_waits']}",
        rule,
        f"{'':<23}{'now':>14}{'peak':>14}{'allocated':>14}{'freed':>14}",
    ]
    for key in _LEVELS:
        values = [stats[f"{key}.all.{figure}"] for figure in ("current", "peak", "allocated", "freed")]
        cells = map(_C.format_bytes if key.endswith("_bytes") else str, values)
        lines.append(f"{key:<23}" + "".join(f"{cell:>14}" for cell in cells))
    if not abbreviated:
        lines += [rule, memory_fragmentation(home)["table"].rstrip("\n")]
    return "\n".join([*lines, rule, *_residency_lines(home), rule, ""])


def _least_of(*counts: int | None) -> int | None:
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
        new = _least_of(left, available)
        free = cached + (properties["free_memory"] if new is None else new)
        return free, free + allocated
    allocated = _C.memory_stats(resolve_device(index))["allocated_bytes.all.current"]
    pinned = _C.residency_stats()["host_bytes"]
    host_limit = get_host_limit()
    on_host = _least_of(None if host_limit is None else host_limit - pinned, available) or 0
    on_device = _least_of(budget - allocated, None if left is None else max(left, 0) + cached) or 0
    free = on_device + on_host
    return free, free + allocated + pinned
