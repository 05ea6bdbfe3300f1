"""Device memory over the iteration of a trace that fits: its peak, what is there then, what blocks add."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise

from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.schedules import Iteration

_OPTIMIZERS = ("aten::_fused_", "aten::_foreach_")  #: updates of lists of tensors
_SCALAR = 512  #: bytes of a block that has one number


@dataclass(frozen=True)
class Largest:
    """Storages at the peak that are alike. ``what``: their role, or the operator that makes them."""

    what: str
    bytes: int
    storages: int


@dataclass(frozen=True)
class TraceMemory:
    """Bytes of one iteration with everything on the device.

    Args:
        peak_bytes: as the allocator counted it, with what blocks add to storages.
        added_bytes: what blocks add at the peak: alignment, and storages that no operator uses.
        largest_operator: bytes of the operands and results of the operator that has most of them, and its
            name. Operands that it may use on the host do not count.
        activations: bytes at the peak that the iteration makes and the backward uses later. Gradients, and
            what the operator at the peak uses itself, do not count.
        activations_made: bytes at the peak that the iteration makes, other than gradients.
        updated_in_place: bytes that optimizers may use on the host.
        largest: at the peak, the largest first.
    """

    peak_bytes: int
    added_bytes: int
    largest_operator: tuple[int, str]
    activations: int
    activations_made: int
    updated_in_place: int
    largest: tuple[Largest, ...]


def memory_of(trace: Trace, whole: Iteration) -> TraceMemory:
    """The memory of a trace's last iteration.

    Args:
        whole: the trace's iteration.
    """
    makers = {use.value: op.name for op in whole.operators for use in op.uses if use.creates}
    alive = {number for number, it in enumerate(whole.values) if it.is_persistent}
    level = _bytes(whole, alive)
    levels: list[int] = []
    at_peak: set[int] = set()
    peak = 0
    for is_steady in (False, True):  # temporaries may live into the next iteration
        for number, op in enumerate(whole.operators):
            made = {use.value for use in op.uses} - alive
            alive |= made
            level += _bytes(whole, made)
            if is_steady:
                levels.append(level)
                if number == 0 or level > levels[peak]:
                    peak, at_peak = number, set(alive)
            freed = alive.intersection(op.frees)
            alive -= freed
            level -= _bytes(whole, freed)
    recorded = _recorded(trace, whole)
    added = max(0, recorded[peak] - levels[peak]) if peak in recorded else 0
    roles = _roles(whole)
    operands = {use.value for use in whole.operators[peak].uses}
    made = {it for it in at_peak if not whole.values[it].is_persistent and it not in roles}
    return TraceMemory(
        max([levels[peak] + added, *recorded.values()]),
        added,
        _largest_operator(trace, whole),
        _bytes(whole, made - operands),
        _bytes(whole, made),
        _bytes(whole, {it for it in roles if whole.values[it].is_persistent}),
        _largest(whole, at_peak, makers, roles),
    )


def _bytes(whole: Iteration, values: Set[int]) -> int:
    return sum(whole.values[value].bytes for value in values)


def host_share(trace: Trace, whole: Iteration, first: int) -> float:
    """The host's time to queue the iteration's operators, as a part of what the trace has timed.

    The longest time between two operators does not count: the host may wait for the device there.

    Args:
        first: operator of the iteration.
    """
    end = first + len(whole.operators)
    times = [op.time_us for op in trace.operators[first : end + 1]]
    gaps = sorted(after - before for before, after in pairwise(times))
    timed = sum(it.us for it in trace.groups if first <= it.first and it.first + it.operators <= end)
    return sum(gaps[:-1]) / timed if timed else 0.0


def _recorded(trace: Trace, whole: Iteration) -> dict[int, int]:
    """Bytes that the allocator had on the device, by operator of the iteration."""
    found: dict[int, int] = {}
    for it in trace.resident:
        at = it.operators - 1 - whole.first
        if 0 <= at < len(whole.operators):
            found[at] = max(it.bytes, found.get(at, 0))
    return found


def _roles(whole: Iteration) -> dict[int, str]:
    """By value that the optimizer uses: parameters, which others use too; its state; gradients.

    It is known by the names of updates of lists of tensors. If there are none, as with ``foreach=False``, by
    sizes.

    An update of one tensor writes a persistent value, and reads a temporary of its size. Operators on state
    use nothing of another size, except for scalars.
    """
    sizes = [it.bytes if it.bytes > _SCALAR else 0 for it in whole.values]
    lists = [op for op in whole.operators if op.name.startswith(_OPTIMIZERS)]
    updated = {use.value for op in lists for use in op.uses}
    for op in whole.operators if not lists else ():
        written = {it.value for it in op.uses if it.writes and not it.creates}
        written = {it for it in written if whole.values[it].is_persistent}
        read = {it.value for it in op.uses if not it.writes and not whole.values[it.value].is_persistent}
        same = {it for it in read if sizes[it] and sizes[it] in {sizes[value] for value in written}}
        if same:
            updated |= written | same
    elsewhere: set[int] = set()
    for op in whole.operators:
        used = {use.value for use in op.uses}
        if not op.name.startswith(_OPTIMIZERS) if lists else len({sizes[value] for value in used} - {0}) > 1:
            elsewhere |= used
    roles = dict.fromkeys(updated, "gradients")
    for it in updated:
        if whole.values[it].is_persistent:
            roles[it] = "parameters" if it in elsewhere else "optimizer state"
    return roles


def _largest_operator(trace: Trace, whole: Iteration) -> tuple[int, str]:
    most = (0, "")
    for number, op in enumerate(whole.operators):
        in_place_ok = trace.operators[whole.first + number].in_place_ok
        values = {use.value for use in op.uses if use.creates or not in_place_ok}
        most = max(most, (sum(whole.values[value].bytes for value in values), op.name))
    return most


def _largest(
    whole: Iteration, at_peak: set[int], makers: dict[int, str], roles: dict[int, str]
) -> tuple[Largest, ...]:
    found: dict[str, list[int]] = {}
    for value in at_peak:
        what = f"made by {makers.get(value, 'no operator')}"
        if whole.values[value].is_persistent:
            what = "frozen parameters, inputs, buffers"
        found.setdefault(roles.get(value, what), []).append(whole.values[value].bytes)
    rows = [Largest(what, sum(sizes), len(sizes)) for what, sizes in found.items()]
    return tuple(sorted(rows, key=lambda it: -it.bytes))
