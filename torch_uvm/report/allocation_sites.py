"""Allocation-site profiler: which lines of the script made the tensors that moved most, or were largest."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, fields

from torch_uvm import _C
from torch_uvm._util.frames import LOOKED_PAST

_KINDS = ("fetched", "written_back", "dropped_clean", "used_in_place")


@dataclass(frozen=True)
class Storages:
    """Storages of one size that one line made; ``file`` is None if no line made them.

    Args:
        node: the node of the backward graph that made them; "": a line did, or it is unknown.
        before: they existed before the recording.
        bytes: of one of them; 0: of various sizes.
        moved: counts and bytes, by the names of `_KINDS`.
    """

    file: str | None
    line: int
    function: str | None
    node: str
    before: bool
    bytes: int
    made: int
    most_alive: int
    moved: dict[str, dict[str, int]]

    @property
    def traffic(self) -> int:
        """Bytes that crossed the link: fetched, written back, or used in place."""
        return sum(self.moved[kind]["bytes"] for kind in ("fetched", "written_back", "used_in_place"))

    @property
    def most_bytes(self) -> int:
        """The most bytes of them that were live at once."""
        return self.bytes * self.most_alive

    @property
    def source(self) -> str:
        """The text of the line; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.file is not None else ""


def start() -> None:
    """Starts to count, from 0."""
    _C.start_counting_allocation_sites(list(LOOKED_PAST))


def stop() -> None:
    """Stops to count. The figures stay."""
    _C.stop_counting_allocation_sites()


def storages() -> list[Storages]:
    """All sites; the most traffic first, then the most memory."""
    names = [it.name for it in fields(Storages) if it.name != "moved"]
    found = [
        Storages(**{name: site[name] for name in names}, moved={kind: site[kind] for kind in _KINDS})
        for site in _C.allocation_site_figures()
    ]
    return sorted(found, key=lambda it: (-it.traffic, -it.most_bytes, it.file or "", it.line))
