"""Plans: what a recorded or dry-run loop would need and take on a card, within budgets (docs/plan.md)."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torch_uvm._tools.access_traces import Trace
from torch_uvm._tools.cards import Card, rates_of_engine
from torch_uvm._tools.deferred_traces import deferred
from torch_uvm._tools.schedules import Iteration, TracedLoop
from torch_uvm._tools.trace_memory import host_share, memory_of

MIB = 1 << 20
KNEE = 1.1  #: multiple of the step in core

_PARTS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)  # of the peak, for budgets "auto"
_SPARE = 21 / 20  # a 32nd of a budget is for staging, and a 64th is a reserve (docs/plan.md)
#: The host's time for the engine at an operator ("operators" in benchmarks/results/residency.json).
_OPERATOR_MS = 1.8e-3
_REFINED = 3  # budgets more, to find the knee

IN_PLACE, DEFERRED = "in place", "deferred"


@dataclass(frozen=True)
class Point:
    """A budget's prediction; times in ms, sizes in bytes of one step.

    ``step_ms``: None if the budget does not suffice; ``note`` says why. ``bound_ms``: None if not known.
    ``optimizer``: `IN_PLACE` or `DEFERRED`, the faster one of those that are known.
    """

    budget: int
    step_ms: float | None
    bound_ms: float | None = None
    optimizer: str = IN_PLACE
    into: int = 0
    out: int = 0
    in_place: int = 0
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What a loop needs and takes on a card.

    Args:
        loop: with updates in place.
        room_bytes: the card's memory, less the reserve of the budget "auto".
        peak_bytes: without a budget.
        points: from the largest budget to the smallest.
    """

    loop: Loop
    room_bytes: int
    peak_bytes: int
    points: tuple[Point, ...]

    @property
    def fits(self) -> bool:
        """Whether the peak fits the card's room."""
        return self.peak_bytes <= self.room_bytes

    @property
    def knee(self) -> Point | None:
        """The smallest budget whose step takes at most `KNEE` times the step in core."""
        most = KNEE * self.loop.in_core_ms
        found = [it for it in self.points if it.step_ms and it.step_ms <= most]
        return min(found, key=lambda it: it.budget, default=None)

    def below_the_knee(self) -> int | None:
        """A budget halfway between the knee's and the largest below it; None: there is none."""
        if (knee := self.knee) is None:
            return None
        slow = [it.budget for it in self.points if it.budget < knee.budget]
        return (knee.budget + max(slow)) // 2 // MIB * MIB if slow else None

    def at_room(self) -> Point | None:
        """The point of the card's room."""
        return next((it for it in self.points if it.budget == self.room_bytes), None)


def room_of(card: Card) -> int:
    """What the budget "auto" would be on a card that nobody else uses (docs/how-it-works.md)."""
    memory = card.memory_bytes
    reserve = memory // 16 if memory < 8 << 30 else max(memory // 20, 512 * MIB)
    return memory - reserve


class Loop:
    """A trace's loop, for predictions within any budget.

    Args:
        on_gpu: the trace was recorded on a GPU, so that its operators' times are of the host's clock.

    Raises:
        ValueError: the trace has no iteration that repeats, no durations, or several devices.
    """

    def __init__(self, trace: Trace, card: Card, on_gpu: bool = True) -> None:
        self.card = card
        self._traced = TracedLoop(trace)
        whole = self._traced.iteration()
        shortest = min((end - begin for begin, end in itertools.pairwise(trace.steps)), default=0)
        if 2 * len(whole.operators) < shortest:
            raise ValueError("the steps have different operators; what repeats is a part of a step")
        found = self._traced.device
        self.trace = found.trace
        device_ms = whole.in_core_ms * whole.steps
        #: How many times as long a step takes in the program, where the host is slower than the device.
        self.pace = found.program_ms / device_ms if found.program_ms > device_ms > 0 else 1.0
        self.whole: Iteration = whole
        self.memory = memory_of(self.trace, whole)
        share = host_share(trace, whole, whole.first if found.first is None else found.first)
        count = len(whole.operators) // whole.steps
        self.host_ms = share * self.in_core_ms if on_gpu else count * card.host_us / 1e3
        #: Of the script's optimizers in what repeats, which every other figure calls a step.
        self.steps = sum(trace.steps[-1] - count < it for it in trace.steps)

    @property
    def in_core_ms(self) -> float:
        """A step with everything on the device."""
        return self.whole.in_core_ms * self.pace

    @property
    def least_bytes(self) -> int:
        """The smallest budget, in MiB, that holds the largest operator beside staging and the reserve."""
        needed = self.memory.largest_operator[0] + self.memory.added_bytes
        return math.ceil(needed * _SPARE / MIB) * MIB

    def point(self, budget: int, optimizer: str = IN_PLACE) -> Point:
        """The prediction within a budget."""
        room = budget - self.memory.added_bytes  # a schedule counts storages, an allocator blocks
        if room <= 0:
            return Point(budget, None, note="too small")
        count = len(self.whole.operators) // self.whole.steps
        host_ms = self.host_ms + count * _OPERATOR_MS
        found = self._traced.predicted(room, host_ms, rates_of_engine(self.card))
        if found.ms == math.inf:
            name = self.memory.largest_operator[1]
            less = ", or use an optimizer with fused=True" if "_foreach_" in name else ""
            return Point(budget, None, note=f"too little: {name} finds no room. Give more{less}")
        # Where nothing moves, the engine is idle, and the durations have the host's time.
        moves = found.into or found.out or found.in_place
        step_ms = max(found.ms, self.in_core_ms) if moves else self.in_core_ms
        return Point(budget, step_ms, None, optimizer, found.into, found.out, found.in_place)


def loops_of(trace: Trace, card: Card, on_gpu: bool = True) -> list[Loop]:
    """The loop with updates in place, and the one with deferred updates, as far as it is known.

    Raises:
        ValueError: as `Loop`.
    """
    loops = [Loop(trace, card, on_gpu)]
    if (later := deferred(trace)) is not None:
        with contextlib.suppress(ValueError):  # derived from a loop that is less regular than it seemed
            loops.append(Loop(later, card, on_gpu))
    return loops


def faster(points: Sequence[Point]) -> Point:
    """The one whose step is shortest; one that has no step, if none has."""
    return min(points, key=lambda it: math.inf if it.step_ms is None else it.step_ms)


def automatic_budgets(loop: Loop, room: int) -> list[int]:
    """Budgets from the peak down to the least that holds the largest operator, and the card's room."""
    peak, least = loop.memory.peak_bytes, loop.least_bytes
    found = {math.ceil(peak / part * _SPARE / MIB) * MIB for part in _PARTS}
    found = {it for it in found if it >= least} | {least}
    if least <= room < peak:
        found = {it for it in found if abs(it - room) > room / 50} | {room}
    return sorted(found, reverse=True)


def make_plan(
    loops: Sequence[Loop],
    budgets: Sequence[int] | None,
    bound: Callable[[Trace, int], float] | None = None,
    peak_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Plan:
    """Predicts a loop within budgets.

    Args:
        loops: the loop with updates in place; and with deferred ones, if that is known.
        budgets: in bytes. None: `automatic_budgets`, and some more around the knee.
        bound: the lower bound of a step in ms; raises ValueError or RuntimeError if there is none. None: not
            known.
        peak_bytes: None: the trace's.
        progress: called with the predictions done, and all of them.
    """
    loop = loops[0]
    room = room_of(loop.card)
    asked = automatic_budgets(loop, room) if budgets is None else sorted(set(budgets), reverse=True)
    refined = _REFINED if budgets is None else 0
    points: dict[int, Point] = {}
    kinds = (IN_PLACE, DEFERRED)

    def add(budget: int) -> None:
        with ThreadPoolExecutor() as pool:  # schedules are made without the GIL
            found = faster(list(pool.map(lambda it, kind: it.point(budget, kind), loops, kinds)))
        bound_ms, note = None, found.note
        if bound is not None and found.step_ms is not None:
            try:
                bound_ms = bound(loop.trace, budget - loop.memory.added_bytes)
            except (ValueError, RuntimeError) as error:
                note = note or f"no bound: {error}"
        points[budget] = replace(found, bound_ms=bound_ms, note=note)
        if progress is not None:
            progress(len(points), len(asked) + refined)

    def plan() -> Plan:
        peak = loop.memory.peak_bytes if peak_bytes is None else peak_bytes
        return Plan(loop, room, peak, tuple(sorted(points.values(), key=lambda it: -it.budget)))

    for budget in asked:
        add(budget)
        if budgets is None and points[budget].step_ms is None:
            break  # smaller ones do not suffice either
    for _ in range(refined):
        middle = plan().below_the_knee()
        if middle is None or middle in points:
            break
        add(middle)
    return plan()
