"""A script on several cards: what it takes on each, and the smallest that is fast enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_uvm import _C
from torch_uvm._util.escaping import printable

FAST = 1.2  #: multiple of the step in core


def at_room(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The point of a plan's card's own memory; None: the script cannot run there."""
    found = [it for it in record["points"] if it["budget"] == record["room_bytes"]]
    return found[0] if found and found[0]["step_ms"] is not None else None


def smallest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The plan of the card with the least memory on which a step takes at most `FAST` times that in core."""
    fast = []
    for record in records:
        point = at_room(record)
        if point is not None and point["step_ms"] <= FAST * record["in_core_ms"]:
            fast.append(record)
    return min(fast, key=lambda it: int(it["card_bytes"]), default=None)


def lines_of(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines that the command prints."""
    size, first = _C.format_bytes, records[0]
    yield f"{'plan of':<14}{printable(first['of'])}"
    yield f"{'peak':<14}{size(first['peak_bytes'])} without a budget"
    if first["is_estimate"]:
        yield f"{'estimate':<14}{size(first['uncertain_bytes'])} of it have sizes that values decide"
    yield ""
    heads = ("memory", "fits", "in core, ms", "step, ms", "/ in core", "optimizer")
    yield f"{'card':<14}" + "".join(f"{head:>12}" for head in heads)
    for record in records:
        point = at_room(record)
        fits, in_core = "yes" if record["fits"] else "no", record["in_core_ms"]
        step, over, optimizer = "cannot run", "-", "-"
        if point is not None:
            step, over = f"{point['step_ms']:.1f}", f"{point['step_ms'] / in_core:.2f}"
            optimizer = point["optimizer"] if point["in_place"] or point["into"] else "-"
        cells = (size(record["card_bytes"]), fits, f"{in_core:.1f}", step, over, optimizer)
        yield f"{printable(record['card']):<14}" + "".join(f"{cell:>12}" for cell in cells)
    yield ""
    found = smallest(records)
    name = "none of them" if found is None else printable(found["card"])
    yield f"{'smallest':<14}{name}, at a step of at most {FAST:g} times that in core"
