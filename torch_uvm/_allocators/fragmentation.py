"""How the free managed memory is fragmented, from a snapshot of the allocator."""

from __future__ import annotations

from typing import Any

import torch

from torch_uvm import _C

_MIB = 1 << 20
#: A row has the free pieces of at least this size, and smaller than the next row's.
_LEAST = (0, 64 << 10, _MIB, 8 * _MIB, 32 * _MIB, 128 * _MIB, 1024 * _MIB)


def _table(found: dict[str, Any]) -> str:
    rows = [(key, count, "") for key, count in found.items() if key.endswith("_bytes")]
    for it in found["pieces"]:
        if it["count"]:
            least = _C.format_bytes(it["least_bytes"])
            rows.append((f"  pieces from {least}", it["bytes"], f"  in {it['count']}"))
    return "".join(f"{name:<29}{_C.format_bytes(count):>14}{more}\n" for name, count, more in rows)


def fragmentation(home: torch.device | None) -> dict[str, Any]:
    """The figures of `torch_uvm.memory.memory_fragmentation`. A block counts for the home that it is filed
    under, a segment for the one that it was made for."""
    place = None if home is None else (-1 if home.type == "cpu" else home.index or 0)
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
    return found | {"table": _table(found)}
