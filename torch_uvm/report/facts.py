"""The input of a report, as plain data, so that a page can be made from numbers of no run."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_uvm.report.allocation_sites import Storages
from torch_uvm.report.samples import Sample, crossed


@dataclass(frozen=True)
class Facts:
    """One process's run.

    Args:
        script: its name; its arguments may hold secrets and are left out.
        ended: how, in words.
        began: the local date and time.
        backend: "emulated", "cuda" or "none". devices: names, by index.
        samples: at least one, over time; by_step: at the ends of the first optimizer steps.
        peaks: the most managed bytes, by device; most_reserved: in total.
        budgets: in bytes, by device, of devices with a budget; asked: the request, in words.
        limit, host_limit: bytes, or None.
        optimizer: "in_place", "deferred" or "auto"; optimizers: names of the classes that made steps.
        foreach: of these, those that update all parameters by the same operators.
        over_in_steps: of the operators over the budget, those within optimizers' steps.
        one_memory: every device has one memory with the host.
        storages: the most traffic first.
    """

    script: str
    ended: str
    began: str
    rank: int | None
    torch_uvm: str
    torch: str
    python: str
    backend: str
    devices: dict[int, str]
    enabled: bool
    samples: list[Sample]
    by_step: list[Sample]
    peaks: dict[int, int]
    most_reserved: int
    budgets: dict[int, int]
    asked: str
    limit: int | None
    host_limit: int | None
    optimizer: str
    optimizers: list[str]
    storages: list[Storages]
    foreach: list[str] = field(default_factory=list)
    over_in_steps: int = 0
    one_memory: bool = False

    @property
    def seconds(self) -> float:
        return self.samples[-1].seconds

    @property
    def most_host(self) -> int:
        """The most pinned bytes of host copies."""
        return max(it.host for it in self.samples)

    def total(self, name: str) -> float:
        """A total of the whole run; the names are those of `Sample.totals`."""
        return self.samples[-1].totals.get(name, 0)

    @property
    def crossed(self) -> float:
        """Bytes that crossed the link."""
        return crossed(self.samples)
