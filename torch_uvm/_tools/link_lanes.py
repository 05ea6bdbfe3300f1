"""Both directions of a link over time: when a copy ends that begins beside others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second: the link to the device and to the host, and kernels that use host memory.

    The defaults are the highest that an H200 has shown, as in the profile "h200" of the emulated accelerator.
    ``both``: both directions together; None: as if each had the link for itself.
    """

    into: float = 55.4e9
    out: float = 55.4e9
    in_place: float = 51.2e9
    both: float | None = None

    @property
    def together(self) -> float:
        """`both`, or what the directions reach alone."""
        return self.into + self.out if self.both is None else self.both


#: ``both`` by copies of plain memory, "plain" in benchmarks/results/copy_overlap.json.
H200 = LinkRates(both=100.7e9)


@dataclass
class _Lane:
    rate: float
    beside: float  #: its rate while the other lane is busy
    free: float = 0.0  #: from then on, in ms
    busy: deque[tuple[float, float]] = field(default_factory=deque)  #: beside these the other lane may copy


class Link:
    """Each direction carries one copy at a time, in the order of the calls.

    While both are busy, the later call gets what the earlier one leaves of the rate of both.
    """

    def __init__(self, rates: LinkRates) -> None:
        self.into = _Lane(rates.into, _left(rates.into, rates.together - rates.out))
        self.out = _Lane(rates.out, _left(rates.out, rates.together - rates.into))

    def copy(self, direction: Literal["into", "out"], at_ms: float, size: float) -> tuple[float, float]:
        """When a copy of ``size`` bytes begins and ends, in ms. It waits until its direction is free."""
        lane, other = (self.into, self.out) if direction == "into" else (self.out, self.into)
        while other.busy and other.busy[0][1] <= lane.free:
            other.busy.popleft()  # no copy of this direction can begin before that any more
        now = begin = max(at_ms, lane.free)
        for other_begin, other_end in other.busy:
            if other_end <= now:
                continue
            if now + size / lane.rate * 1e3 <= other_begin:
                break
            size -= max(0.0, other_begin - now) * lane.rate / 1e3
            now = max(now, other_begin)
            moved = min(size, (other_end - now) * lane.beside / 1e3)
            size -= moved
            now += moved / lane.beside * 1e3
        lane.free = now + size / lane.rate * 1e3
        lane.busy.append((begin, lane.free))
        return begin, lane.free

    def occupy(self, direction: Literal["into", "out"], at_ms: float, takes_ms: float) -> None:
        """Other traffic of one direction: later copies wait for it."""
        lane = self.into if direction == "into" else self.out
        lane.free = max(at_ms, lane.free) + takes_ms


def _left(alone: float, of_both: float) -> float:
    """Above 0, so that a copy ends."""
    return min(max(of_both, alone / 16), alone)
