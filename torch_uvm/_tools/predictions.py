"""How long an iteration takes that follows a schedule: operators, and both directions of the link, over time.

The model: operators run one after the other. Each direction of the link carries one transfer at a time, in
order of their triggers, and both share what the link carries in all (link_lanes.py). A fetch begins once
there is room for it. An operator begins once its operands are there and there is room for its results. A use
in place takes at least the link's time, and copies wait for it. Memory has no fragments.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from torch_uvm._tools.link_lanes import H200, Link, LinkRates
from torch_uvm._tools.schedules import Schedule, Transfer

_ROUNDS = 4  #: the last one is the steady state


@dataclass(frozen=True)
class Span:
    """Something that takes from ``begin_ms`` to ``end_ms``. ``number``: of the operator or transfer."""

    begin_ms: float
    end_ms: float
    number: int


@dataclass
class Prediction:
    """One iteration in the steady state; times count from its beginning.

    Args:
        step_ms: its duration; if it has several steps, that of one.
    """

    step_ms: float = 0.0
    compute: list[Span] = field(default_factory=list)
    into: list[Span] = field(default_factory=list)
    out: list[Span] = field(default_factory=list)


def predict(schedule: Schedule, rates: LinkRates | None = None) -> Prediction:
    """The time of an iteration that follows the schedule, in the steady state.

    Args:
        rates: of the link. None: an H200's.

    Raises:
        ValueError: an operator needs more room than its schedule leaves.
    """
    return _Model(schedule, rates or H200).run()


class _Model:
    def __init__(self, schedule: Schedule, rates: LinkRates) -> None:
        self.schedule = schedule
        self.in_place_rate = rates.in_place
        self.link = Link(rates)
        self.after: list[list[int]] = [[] for _ in schedule.operators]
        self.leaving: list[list[int]] = [[] for _ in schedule.operators]
        for number, it in enumerate(schedule.transfers):
            self.after[it.after].append(number)
            if it.kind != "fetch":
                self.leaving[(it.after + it.stays) % len(self.leaving)].append(number)
        self.written_back: dict[int, float] = {}  # when the bytes of transfers are on the host
        self.sizes = [it.bytes for it in schedule.values]
        self.ready: dict[int, float] = {}  # resident values, and when their bytes are there
        self.pending: deque[tuple[int, float]] = deque()  # fetches, and when they were triggered
        self.frees: list[tuple[float, int]] = []  # bytes to be freed, by time
        self.used = 0
        self.freed_until = 0.0  # all that was freed by then is in `used`
        self.now = 0.0
        self.into: list[Span] = []
        self.out: list[Span] = []

    def run(self) -> Prediction:
        begin = 0.0
        found = Prediction()
        for _ in range(_ROUNDS):
            begin, found = self.now, Prediction()
            for number in range(len(self.schedule.operators)):
                self.operator(number, begin, found)
        found.step_ms = (self.now - begin) / self.schedule.steps
        for spans, lane in ((self.into, found.into), (self.out, found.out)):
            lane += [
                Span(it.begin_ms - begin, it.end_ms - begin, it.number) for it in spans if it.end_ms > begin
            ]
        return found

    def operator(self, number: int, begin: float, found: Prediction) -> None:
        op = self.schedule.operators[number]
        self.start_fetches(until=self.now)
        start = self.now
        read = written = made = 0
        for use in op.uses:
            if use.in_place:
                read += self.sizes[use.value]
                written += self.sizes[use.value] if use.writes else 0
            elif use.creates or (use.value not in self.ready and not self.is_on_its_way(use.value)):
                # New, or in the first round not there yet. What is made again takes its own place.
                made += 0 if use.value in self.ready else self.sizes[use.value]
            else:
                while use.value not in self.ready:
                    self.start_fetches(until=None)
                start = max(start, self.ready[use.value])
        room = self.take(made, start, until=None)
        if room is None:
            raise ValueError(f"operator {number}, {op.name}, finds no room")
        self.link.occupy("into", room, read / self.in_place_rate * 1e3)
        self.link.occupy("out", room, written / self.in_place_rate * 1e3)
        self.now = room + max(op.ms, read / self.in_place_rate * 1e3)
        found.compute.append(Span(room - begin, self.now - begin, number))
        for use in op.uses:
            if not use.in_place:
                self.ready.setdefault(use.value, room)
        for value in op.frees:
            self.leave(value, self.now)
        for transfer in self.after[number]:
            self.trigger(transfer, self.schedule.transfers[transfer])
        for transfer in self.leaving[number]:
            end = max(self.now, self.written_back.get(transfer, self.now))
            self.leave(self.schedule.transfers[transfer].value, end)

    def trigger(self, number: int, transfer: Transfer) -> None:
        if transfer.kind == "fetch":
            self.pending.append((number, self.now))
        elif transfer.kind == "write_back" and transfer.value in self.ready:
            begin, end = self.link.copy("out", self.now, self.sizes[transfer.value])
            self.out.append(Span(begin, end, number))
            self.written_back[number] = end

    def is_on_its_way(self, value: int) -> bool:
        return any(self.schedule.transfers[number].value == value for number, _ in self.pending)

    def start_fetches(self, until: float | None) -> None:
        """Starts the pending fetches that find room by then. None: the first of them, whenever that is."""
        while self.pending:
            number, triggered = self.pending[0]
            value = self.schedule.transfers[number].value
            if value not in self.ready:
                room = self.take(self.sizes[value], max(triggered, self.link.into.free), until)
                if room is None:
                    if until is None:
                        raise ValueError(f"transfer {number} finds no room")
                    return
                _, end = self.link.copy("into", room, self.sizes[value])
                self.into.append(Span(room, end, number))
                self.ready[value] = end
            self.pending.popleft()
            if until is None:
                return

    def take(self, amount: int, at: float, until: float | None) -> float | None:
        """When there is room, from ``at`` on; None: not by ``until``."""
        while self.frees and self.used + amount > self.schedule.capacity:
            if until is not None and self.frees[0][0] > until:
                break
            self.freed_until, freed = heapq.heappop(self.frees)
            self.used -= freed
        at = max(at, self.freed_until)
        if self.used + amount > self.schedule.capacity:
            return None
        self.used += amount
        return at

    def leave(self, value: int, time: float) -> None:
        if value in self.ready:
            del self.ready[value]
            heapq.heappush(self.frees, (time, self.sizes[value]))
