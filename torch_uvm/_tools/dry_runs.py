"""Dry runs: a script on the emulated accelerator that allocates and records, and does not compute."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_uvm._tools.access_traces import Trace, read_trace
from torch_uvm._tools.cards import Card
from torch_uvm._tools.repeated_steps import repeated

#: Steps of which a schedule can be made.
FEWEST = 4
#: Steps to run after the first one, tried in turn. Two that are alike make a loop. If they are not, updates
#: of single tensors may look like a loop of their own at first.
STEPS = (2, FEWEST, 4 * FEWEST)
_UNCERTAIN = 0.1  # of the peak
_MEMORY = "64TiB"  # of the emulated device: a dry run asks what a script needs, not whether it fits


def short(file: str) -> str:
    """A file of the current folder, or of a package, without what is above."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here).rpartition(f"site-packages{os.sep}")[2]


def _by_line(sites: Sequence[Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """By line of the script, or node of the backward graph, what it had at once; the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for file, line, function, node, more_bytes, more_storages in sites:
        place = f"the backward, {node}" if node else "made by no line of the script"
        if file:
            place = f"{short(file)}:{line} in {function}" + (f", {node}" if node else "")
        bytes, storages = found.get(place, (0, 0))
        found[place] = bytes + more_bytes, storages + more_storages
    return dict(sorted(found.items(), key=lambda it: -it[1][0]))


@dataclass(frozen=True)
class StandIn:
    """Something that the script got in place of a computed value.

    Args:
        what: such as "item", "nonzero", "save".
        place: file:line of the script; "" if unknown.
        count: how often.
        value: what it got, as text; "various" if not always the same.
        peak_bytes: of tensors at the peak whose sizes follow from it.
    """

    what: str
    place: str
    count: int
    value: str
    peak_bytes: int


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Args:
        traces: by card, a timed trace (docs/annex.md) of the steps after the first one, without transfers.
            Each operator is a group of its own, whose time is the card's.
        steps: how many steps the trace has, by optimizers.
        last_step: operators of the last one.
        peak_bytes: the most bytes that were allocated on the device at once, since the script began.
        step_peak_bytes: the same of the steps after the first.
        step_ms: the device's time of the trace's last step.
        by_line: the most bytes, and the most storages, that each line had at once, the largest first.
        stand_ins: the most frequent first.
        uncertain_bytes: of tensors at the peak whose sizes follow from any of them.
        ended: the script ended by itself, before all steps were run.
        output: what the script printed.
    """

    traces: tuple[Path, ...]
    steps: int
    last_step: int
    peak_bytes: int
    step_peak_bytes: int
    step_ms: float
    by_line: Mapping[str, tuple[int, int]]
    stand_ins: tuple[StandIn, ...]
    uncertain_bytes: int
    ended: bool
    output: Path

    def loops(self) -> list[Trace]:
        """By card, a trace with as many steps as a schedule needs: if it has fewer, the last one goes on.

        Raises:
            ValueError: there are fewer, and they differ.
        """
        found = []
        for path in self.traces:
            trace = read_trace(path)
            if trace.operators and self.steps < FEWEST:
                longer = repeated(trace, self.last_step, FEWEST - self.steps)
                if longer is None:
                    raise ValueError("its steps differ")
                trace = longer
            found.append(trace)
        return found

    @property
    def is_estimate(self) -> bool:
        """Whether values that were not computed decide too much for an answer."""
        return self.uncertain_bytes > _UNCERTAIN * self.peak_bytes


class DryRunError(RuntimeError):
    """The script could not be run dry. The message says why and what to do; ``output`` is what it printed."""

    def __init__(self, message: str, output: Path) -> None:
        super().__init__(message)
        self.output = output


def dry_run(
    argv: Sequence[str],
    *,
    cards: Sequence[Card],
    folder: Path,
    steps: int = 4,
    progress: Callable[[int, int], object] | None = None,
) -> DryRun:
    """Runs a script for some steps in a process of its own, without computing.

    The process ends after ``1 + steps`` optimizer steps, or ``2 + steps`` where several optimizers take
    turns: those of the one that steps first count. It inherits the environment, and writes ``run.trace``,
    ``run.json`` (the result, without paths) and ``output.txt`` into ``folder``.

    Args:
        argv: the script and its arguments, or "-m", a module and its arguments.
        cards: whose times the traces have.
        folder: an existing one.
        steps: to record after the first.
        progress: called with hundredths of steps done, and all of them, as the script goes on.

    Raises:
        DryRunError: the script raised, ran no step, or uses what a dry run cannot give.
    """

    def start(output: Path, read_end: int, write_end: int) -> int:
        request = {
            "argv": list(argv),
            "cards": [dataclasses.asdict(it) for it in cards],
            "folder": str(folder.absolute()),
            "steps": steps,
            "progress": write_end,
        }
        os.set_inheritable(write_end, True)
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "torch_uvm.cli.dry_child", json.dumps(request)],
            _environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT, 0o666),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )

    return _run(start, folder, progress)


def dry_fork(run: Callable[[int], object], *, folder: Path) -> DryRun:
    """The same in a fork of this process.

    Args:
        run: gets the end of the pipe for progress, writes the result into ``folder``, and leaves the process.
    """

    def start(output: Path, read_end: int, write_end: int) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads without locks
            child = os.fork()
        if child == 0:
            try:
                os.close(read_end)
                file = os.open(output, os.O_WRONLY | os.O_CREAT)
                os.dup2(file, 1)
                os.dup2(file, 2)
                run(write_end)
            except Exception as error:
                (folder / "error.json").write_text(json.dumps(f"{type(error).__name__}: {error}"))
            finally:
                os._exit(1)
        return child

    return _run(start, folder, None)


def _run(
    start: Callable[[Path, int, int], int], folder: Path, progress: Callable[[int, int], object] | None
) -> DryRun:
    """Follows a process until it ends.

    Args:
        start: gets the file for the output, and both ends of the pipe for progress. Returns the process.
    """
    output = folder / "output.txt"
    for stale in (output, folder / "run.json", folder / "error.json", *folder.glob("*.trace")):
        stale.unlink(missing_ok=True)
    read_end, write_end = os.pipe()
    child = start(output, read_end, write_end)
    os.close(write_end)
    code: int | None = None
    try:
        with open(read_end, encoding="utf-8") as told:
            for line in told:
                if line == "end\n":  # its own processes may keep the pipe open
                    break
                if progress is not None:
                    progress(*map(int, line.split()))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return _result(folder, output, code)


def trace_name(number: int) -> str:
    """The file of a card's trace."""
    return f"run{number or ''}.trace"


def options(devices: str = "1") -> str:
    """Those of the process of a dry run, as TORCH_UVM_CONF has them."""
    return f"limit:{_MEMORY},budget:{_MEMORY},emulated_memory:{_MEMORY},emulated_devices:{devices}"


def _environment() -> dict[str, str]:
    compiler = {"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_UVM_REPORT")}
    return {
        **inherited,
        **compiler,
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_UVM": "1",
        "TORCH_UVM_DEVICE": "emu",
        "TORCH_UVM_CONF": options(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    }


def _result(folder: Path, output: Path, code: int) -> DryRun:
    if (folder / "error.json").exists():
        raise DryRunError(json.loads((folder / "error.json").read_text()), output)
    if not (folder / "run.json").exists():
        raise DryRunError(f"the process of the dry run ended with {code} and no result", output)
    found = json.loads((folder / "run.json").read_text())
    if found["peak_bytes"] == 0:
        said = "the script used no accelerator; it should ask torch.accelerator.current_accelerator() for one"
        raise DryRunError(said, output)
    if found["step_ms"] is None:
        said = (
            "the script ended before its second optimizer step; a dry run records the steps after the first. "
            "Without an optimizer, call torch_uvm.step() at the end of each"
        )
        raise DryRunError(said, output)
    lines = _by_line(found.pop("sites"))
    stand_ins = tuple(StandIn(*it) for it in found.pop("stand_ins"))
    traces = tuple(folder / trace_name(number) for number in range(found.pop("cards")))
    return DryRun(traces, by_line=lines, stand_ins=stand_ins, output=output, **found)
