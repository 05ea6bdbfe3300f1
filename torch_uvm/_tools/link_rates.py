"""Rates of a card's link: those of an idle one, and what the residency engine reaches of them.

The figures below were measured on an H200, apart from the workloads that predictions are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_uvm._tools.cards import Card

#: The part of the link's rate that the engine's copies reach, because they are staged: 51 and 52.5 of 55.3
#: GB/s ("rates" in benchmarks/results/residency.json). Both ways: 98.1 of 100.7 ("staged" and "plain" in
#: benchmarks/results/copy_overlap.json).
_INTO, _OUT, _BOTH = 0.92, 0.95, 0.974
#: What a copy and operators that run for as long take together, in multiples of one of them: with copies into
#: the device, and out of it ("staged" in benchmarks/results/copy_overlap.json). Copies and operators both
#: take longer, and almost all copies are beside operators.
_LONGER_INTO, _LONGER_OUT = 1.17, 1.21
#: The host's time for a transfer, as a mixture of experts and T5 have shown it (docs/performance.md).
_TRANSFER_MS = 0.2


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second: the link to the device and to the host, and kernels that use host memory.

    The defaults are the highest that an H200 has shown, as in the profile "h200" of the emulated accelerator.

    Args:
        both: both directions together; None: as if each had the link for itself.
        transfer_ms: the host's time to start a transfer.
        slowed: what operators lose per time of copies beside them.
    """

    into: float = 55.4e9
    out: float = 55.4e9
    in_place: float = 51.2e9
    both: float | None = None
    transfer_ms: float = 0.0
    slowed: float = 0.0

    @property
    def together(self) -> float:
        """`both`, or what the directions reach alone."""
        return self.into + self.out if self.both is None else self.both


#: ``both`` by copies of plain memory, "plain" in benchmarks/results/copy_overlap.json.
H200 = LinkRates(both=100.7e9)


def link_rates(card: Card) -> LinkRates:
    """The rates of an idle link."""
    return LinkRates(card.into, card.out, card.in_place, card.both)


def rates_of_engine(card: Card) -> LinkRates:
    """The rates that the engine reaches beside operators. What is used in place is updated there."""
    return LinkRates(
        card.into * _INTO / _LONGER_INTO,
        card.out * _OUT / _LONGER_OUT,
        card.in_place_written or card.in_place,
        link_rates(card).together * _BOTH * 2 / (_LONGER_INTO + _LONGER_OUT),
        _TRANSFER_MS,
        1 - 1 / _LONGER_INTO,
    )
