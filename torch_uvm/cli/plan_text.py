"""A plan as a record for tools, and in words; what a script takes on each of several cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch_uvm import _C
from torch_uvm._tools.dry_runs import DryRun, short
from torch_uvm._tools.plan_advice import advice
from torch_uvm._tools.plans import KNEE, Plan
from torch_uvm._util.escaping import printable

FORMAT = "torch_uvm plan"
VERSION = 2

FAST = 1.2  #: multiple of the step in core
_MOST_LINES = 8  # of tensors, and of stand-ins


def record_of(
    plan: Plan, of: str, knows_deferred: bool, found: DryRun | None = None, bound_note: str = ""
) -> dict[str, Any]:
    """The plan as JSON has it; sizes in bytes, times in ms.

    Args:
        of: what is planned: a script, or a trace.
        found: what a dry run found.
        bound_note: why there are no bounds.
    """
    is_estimate = found is not None and found.is_estimate
    lines = found.by_line if found else {}
    bytes_needed, operator = plan.loop.memory.largest_operator
    return {
        "of": of,
        "card": plan.loop.card.name,
        "card_bytes": plan.loop.card.memory_bytes,
        "room_bytes": plan.room_bytes,
        "in_core_ms": plan.loop.in_core_ms,
        "optimizer_steps": plan.loop.steps,
        "peak_bytes": plan.peak_bytes,
        "uncertain_bytes": found.uncertain_bytes if found else 0,
        "is_estimate": is_estimate,
        "fits": plan.fits,
        "missing_bytes": max(0, plan.peak_bytes - plan.room_bytes),
        "least_bytes": plan.loop.least_bytes,
        "largest_operator": {"name": operator, "bytes": bytes_needed},
        "points": [asdict(it) for it in plan.points],
        "bound_note": bound_note,
        "knee_bytes": plan.knee.budget if plan.knee is not None else None,
        "at_peak": [asdict(it) for it in plan.loop.memory.largest],
        "by_line": [{"what": it, "bytes": total[0], "storages": total[1]} for it, total in lines.items()],
        "advice": advice(plan, knows_deferred, is_estimate),
        "stand_ins": [asdict(it) for it in found.stand_ins] if found else [],
    }


def lines_of(record: Mapping[str, Any]) -> Iterator[str]:
    """The lines that the command prints."""
    size = _C.format_bytes
    reserve = record["card_bytes"] - record["room_bytes"]
    steps = record["optimizer_steps"]
    takes = f"{steps} optimizer steps that repeat take" if steps > 1 else "a step takes"
    card, step = printable(record["card"]), f"{takes} {record['in_core_ms']:.1f} ms"
    yield f"{'plan of':<14}{printable(record['of'])}"
    yield f"{'card':<14}{card}: {size(record['card_bytes'])}, less a reserve of {size(reserve)}"
    yield f"{'peak':<14}{size(record['peak_bytes'])} without a budget; {step}"
    spare, missing = size(max(0, record["room_bytes"] - record["peak_bytes"])), size(record["missing_bytes"])
    answer = f"yes, with {spare} to spare" if record["fits"] else f"no: {missing} are missing"
    if record["is_estimate"]:
        uncertain = f"{size(record['uncertain_bytes'])} of the peak have sizes that values decide"
        answer = f"{answer}; {uncertain}, which were not computed"
    yield f"{'estimate' if record['is_estimate'] else 'fits':<14}{answer}"
    largest = printable(record["largest_operator"]["name"])
    yield f"{'least budget':<14}{size(record['least_bytes'])}, for {largest} with its operands and results"
    yield ""
    yield from _table(record)
    yield ""
    if record["knee_bytes"] is None:
        yield f"{'knee':<14}none: every budget's step takes more than {KNEE:g} times the step in core"
    else:
        knee = size(record["knee_bytes"])
        yield f"{'knee':<14}{knee}, the smallest budget whose step takes at most {KNEE:g} times that in core"
    yield ""
    yield "at the peak"
    yield from _largest(record["at_peak"])
    if record["by_line"]:
        yield ""
        yield "the most that each line has at once"
        yield from _largest(record["by_line"])
    if record["stand_ins"]:
        yield ""
        yield "not computed (docs/plan.md says what the script got)"
        for it in record["stand_ins"][:_MOST_LINES]:
            what, place = printable(it["what"]), printable(short(it["place"]) or "?")
            decides = f"; it decides {size(it['peak_bytes'])} of the peak" if it["peak_bytes"] else ""
            yield f"  {it['count']:>5}  {what} at {place}: {printable(it['value'])}{decides}"
        if len(record["stand_ins"]) > _MOST_LINES:
            yield f"  ... and {len(record['stand_ins']) - _MOST_LINES} more places"
    yield ""
    yield "advice"
    for sentence in record["advice"]:
        yield f"  - {printable(sentence)}"


def _largest(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    size = _C.format_bytes
    for it in rows[:_MOST_LINES]:
        yield f"  {size(it['bytes']):>11}  {it['storages']:>5}  {printable(it['what'])}"
    if rest := rows[_MOST_LINES:]:
        total = sum(it["bytes"] for it in rest)
        yield f"  {size(total):>11}  {sum(it['storages'] for it in rest):>5}  the rest"


def _table(record: Mapping[str, Any]) -> Iterator[str]:
    size = _C.format_bytes
    heads = ("budget", "step, ms", "/ in core", "bound, ms", "in", "out", "in place", "optimizer")
    yield "".join(f"{head:>12}" for head in heads)
    for it in record["points"]:
        if it["step_ms"] is None:
            yield f"{size(it['budget']):>12}{'-':>12}  {printable(it['note'])}"
            continue
        bound = "-" if it["bound_ms"] is None else f"{it['bound_ms']:.1f}"
        moved = [size(it[key]) if it[key] else "-" for key in ("into", "out", "in_place")]
        over = it["step_ms"] / record["in_core_ms"]
        yield (
            f"{size(it['budget']):>12}{it['step_ms']:>12.1f}{over:>12.2f}{bound:>12}"
            + "".join(f"{each:>12}" for each in moved)
            + f"{it['optimizer']:>12}"
            + (f"  {printable(it['note'])}" if it["note"] else "")
        )
    if record["bound_note"]:
        yield f"{'':>12}no bound: {printable(record['bound_note'])}"


def _at_room(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The point of a plan's card's own memory; None: the script cannot run there."""
    found = [it for it in record["points"] if it["budget"] == record["room_bytes"]]
    return found[0] if found and found[0]["step_ms"] is not None else None


def smallest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The plan of the card with the least memory on which a step takes at most `FAST` times that in core."""
    fast = [it for it in records if (at := _at_room(it)) and at["step_ms"] <= FAST * it["in_core_ms"]]
    return min(fast, key=lambda it: int(it["card_bytes"]), default=None)


def lines_of_cards(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines that the command prints of a script on several cards."""
    size, first = _C.format_bytes, records[0]
    yield f"{'plan of':<14}{printable(first['of'])}"
    yield f"{'peak':<14}{size(first['peak_bytes'])} without a budget"
    if first["is_estimate"]:
        yield f"{'estimate':<14}{size(first['uncertain_bytes'])} of it have sizes that values decide"
    yield ""
    heads = ("memory", "fits", "in core, ms", "step, ms", "/ in core", "optimizer")
    yield f"{'card':<14}" + "".join(f"{head:>12}" for head in heads)
    for record in records:
        point = _at_room(record)
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
