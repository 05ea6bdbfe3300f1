"""Schedules of traces as objects: an iteration, and what the engine decides for it within a budget."""

from __future__ import annotations

from dataclasses import dataclass

from torch_uvm._tools.cards import H200, LinkRates
from torch_uvm._tools.schedules import Iteration, TracedLoop
from torch_uvm.traces import Trace


@dataclass(frozen=True)
class Transfer:
    """``kind``: "fetch", "write_back" or "drop", which copies nothing, because the host has the same bytes.

    Args:
        after: the operator that triggers it, when it has ended.
        stays: how many operators later the device's copy is given up. It is read until then.
    """

    kind: str
    value: int
    after: int
    stays: int = 0


@dataclass(frozen=True)
class Schedule(Iteration):
    """An iteration within a budget.

    Args:
        capacity: the part of the budget for storages.
        transfers: what crosses the link, and when.
        in_place: uses of host copies: operators and values.
        predicted_ms: of a step that follows it; infinite if an operator or a fetch finds no room.
    """

    capacity: int
    transfers: tuple[Transfer, ...]
    in_place: frozenset[tuple[int, int]]
    predicted_ms: float

    def bytes_of(self, kind: str) -> int:
        """Bytes of all transfers of this kind."""
        return sum(self.values[it.value].bytes for it in self.transfers if it.kind == kind)

    def bytes_in_place(self) -> int:
        """Bytes of the uses of host copies."""
        return sum(self.values[value].bytes for _, value in self.in_place)


def schedule_of(trace: Trace, budget: int, step_ms: float | None = None, rates: LinkRates = H200) -> Schedule:
    """The schedule that the engine follows at the end of a trace."""
    loop = TracedLoop(trace, step_ms)
    found = loop.decided(budget, 0.0, rates, whole=True)
    whole = loop.iteration_of(found)
    transfers = [Transfer("fetch", value, after) for value, after in found["fetches"]]
    for value, after, written in found["evictions"]:
        early = written is not None and value in found["write_backs"][written]
        stays = (after - written) % len(whole.operators) if early else 0
        kind = "drop" if written is None else "write_back"
        transfers.append(Transfer(kind, value, written if early else after, stays))
    used = zip(found["uses"], found["in_place"], strict=True)
    return Schedule(
        **vars(whole),
        capacity=found["capacity"],
        transfers=tuple(transfers),
        in_place=frozenset((op, value) for (value, op, _, _), in_place in used if in_place),
        predicted_ms=found["predicted_ms"] / whole.steps,
    )
