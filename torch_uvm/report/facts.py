"""The input of a report, as plain data, so that a page can be made from numbers of no run."""

from __future__ import annotations

from dataclasses import dataclass

from torch_uvm.report.allocation_sites import Storages
from torch_uvm.report.samples import Sample


@dataclass(frozen=True)
class Facts:
    """One process's run.

    Args:
        title: the script's name; its arguments may hold secrets and are left out.
        ended: when it began, and how it ended.
        settings: and versions, in words.
        backend: "emulated", "cuda" or "none". devices: names, by index.
        samples: at least one, over time; step_ends: of the first optimizer steps, in seconds.
        peaks: the most managed bytes, by device; most_reserved: in total.
        budgets: in bytes, by device, of devices with a budget.
        limit, host_limit: bytes, or None.
        one_memory: every device has one memory with the host.
        storages: the most traffic first.
    """

    title: str
    ended: str
    settings: dict[str, str]
    backend: str
    devices: dict[int, str]
    enabled: bool
    samples: list[Sample]
    step_ends: list[float]
    peaks: dict[int, int]
    most_reserved: int
    budgets: dict[int, int]
    limit: int | None
    host_limit: int | None
    one_memory: bool
    storages: list[Storages]

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
    def waited(self) -> float:
        """Seconds that the host waited, for copies or for memory on a device."""
        return (self.total("waited.ms") + self.total("made_room.ms")) / 1e3

    @property
    def crossed(self) -> float:
        """Bytes that crossed the link."""
        return sum(self.total(f"{it}.bytes") for it in ("fetched", "written_back", "used_in_place"))
