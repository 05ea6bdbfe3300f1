"""Dry runs: a script on the emulated accelerator that allocates and records, and does not compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_uvm._tools.cards import Card


@dataclass(frozen=True)
class Site:
    """Storages that one line of the script made, as they were when the device's memory had its peak.

    ``file`` is "" if no line made them; ``node`` is the node of the backward graph that did, or "".
    """

    file: str
    line: int
    function: str
    node: str
    bytes: int
    storages: int


@dataclass(frozen=True)
class StandIn:
    """Something that the script got in place of a computed value.

    Args:
        what: such as "item", "nonzero", "save".
        place: file:line of the script; "" if unknown.
        count: how often.
        value: what it got, as text.
    """

    what: str
    place: str
    count: int
    value: str


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Args:
        trace: a timed trace (docs/traces.md) of the steps after the first one, without transfers. Each
            operator is a group of its own, whose time is the card's.
        steps: how many steps the trace has, by optimizers. A schedule needs four.
        peak_bytes: the most bytes that storages on the device had at once.
        step_ms: the device's time of the trace's last whole step; None: fewer than one.
        sites: the largest first.
        stand_ins: the most frequent first.
        ended: the script ended by itself, before all steps were run.
        output: what the script printed.
    """

    trace: Path
    steps: int
    peak_bytes: int
    step_ms: float | None
    sites: tuple[Site, ...]
    stand_ins: tuple[StandIn, ...]
    ended: bool
    output: Path


class DryRunError(RuntimeError):
    """The script could not be run dry. The message says why and what to do; ``output`` is what it printed."""

    def __init__(self, message: str, output: Path) -> None:
        super().__init__(message)
        self.output = output


def dry_run(
    argv: Sequence[str],
    *,
    card: Card,
    folder: Path,
    steps: int = 4,
    progress: Callable[[int, int], object] | None = None,
) -> DryRun:
    """Runs a script for some steps in a process of its own, without computing.

    The process ends after ``1 + steps`` optimizer steps. It inherits the environment, and writes
    ``run.trace``, ``run.json`` (the result, without paths) and ``output.txt`` into ``folder``.

    Args:
        argv: the script and its arguments, or "-m", a module and its arguments.
        card: whose times the trace has.
        folder: an existing one.
        steps: to record after the first.
        progress: called with the steps done, and all of them, as the script goes on.

    Raises:
        DryRunError: the script raised, ran no step, or uses what a dry run cannot give.
    """
    raise NotImplementedError
