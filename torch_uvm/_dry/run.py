"""A dry run in this process: from the first operator to the last step that is asked for."""

from __future__ import annotations

import bisect
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_uvm._allocators.statistics import max_memory_allocated, reset_peak_memory_stats
from torch_uvm._dry.autocast import cast_as_on_cuda
from torch_uvm._dry.cuda_names import answer_for_cuda
from torch_uvm._dry.left_out import leave_out
from torch_uvm._dry.mode import DryMode
from torch_uvm._dry.nvml import answer_for_nvml
from torch_uvm._dry.results import NoResult
from torch_uvm._dry.timeline import Timeline, durations_us
from torch_uvm._patches.import_hooks import when_imported
from torch_uvm._residency.steps import step
from torch_uvm._tools.cards import Card
from torch_uvm._tools.dry_runs import trace_name
from torch_uvm._tools.recording import AccessRecording, record_accesses
from torch_uvm._util.frames import without_our_frames
from torch_uvm.report import allocation_sites

_MOST_SITES = 64
_LONGEST = 200  # characters of an exception
_GPU_WORDS = ("CUDA", "cuda", "NVTX", "NVIDIA", "cuDNN", "nvml", "NVML", "NCCL")


class Run:
    """Counts steps, records, and writes the result.

    The optimizer that steps first counts them, or `torch_uvm.step()`. Others may step more often, as where
    each parameter has one of its own.

    Args:
        folder: for the trace and the result.
        steps: to record after the first.
        cards: whose times the traces get; scripts see the first.
        progress: an open file; it gets lines with hundredths of steps done, and all of them; then "end".
    """

    def __init__(self, folder: Path, steps: int, cards: Sequence[Card], progress: int) -> None:
        self.mode = DryMode(*cards)
        self.folder = folder
        self._raw = folder / "raw.trace"
        self._steps = steps
        self._report = os.fdopen(progress, "w", buffering=1)
        self._cards = cards
        self._first: object = None
        self._done = 0
        self._warm = 1  # steps before those that are recorded
        self._before = 0  # the peak until then
        self._recording: AccessRecording | None = None
        self._ends_us: list[float] = []  # of the steps, by the clock of traces
        self._ends = [0]  # of the steps, in kernels
        self.mode.timeline.progress = self._tell

    def run(self, program: Callable[[], object]) -> NoReturn:
        """Runs a program, and leaves the process. What ends the run is in error.json."""
        self._begin()
        try:
            program()
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                _tell(error, self.folder)
        self.finish(ended=True)

    def _begin(self) -> None:
        """From here on the thread's operators do not compute."""
        leave_out(self.mode.stand_ins)
        answer_for_cuda(self._cards[0])
        when_imported("pynvml", lambda module: answer_for_nvml(module, self._cards[0]))
        allocation_sites.start()
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._stepped(optimizer))
        sys.modules["torch_uvm"].step = self._step  # type: ignore[attr-defined]
        self._kernels = as_on_cuda()
        _note_waits(self.mode.timeline)
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def _step(self) -> None:
        """`torch_uvm.step()` of a script without an optimizer."""
        step()
        self._stepped(step)

    def _stepped(self, by: object) -> None:
        if self._first is None:
            self._first = by
        if by is not self._first:
            self._warm = 2  # others end their first step only now, in the steps that are counted
            return
        self._done += 1
        self._ends_us.append(time.monotonic_ns() / 1e3)
        self._ends.append(len(self.mode.timeline.kernels))
        self._tell()
        if self._done <= self._warm:
            self._before = max(self._before, _peak())
            for it in _devices():
                reset_peak_memory_stats(it)
            if self._recording is not None:
                self._recording.stop()
            self._recording = record_accesses(self._raw)
        elif self._done == self._warm + self._steps:
            self.finish(ended=False)

    def _tell(self) -> None:
        """How far the run is, if this step is as long as the last one."""
        part = 0.0
        if self._done:
            last = self._ends[-1] - self._ends[-2]
            part = min((len(self.mode.timeline.kernels) - self._ends[-1]) / max(last, 1), 0.99)
        self._report.write(f"{int(100 * (self._done + part))} {100 * (self._warm + self._steps)}\n")

    def finish(self, *, ended: bool) -> NoReturn:
        """Writes the traces with the cards' times, and the result. Leaves the process."""
        peak = _peak()
        allocation_sites.stop()
        last_step, last_ms = 0, None
        if self._recording is not None:
            self._recording.stop()
            last_step, last_ms = self._time_traces()
        sites = sorted(allocation_sites.storages(), key=lambda it: -it.most_bytes)[:_MOST_SITES]
        stand_ins, sizes = self.mode.stand_ins, self.mode.sizes
        found = {
            "steps": max(self._done - self._warm, 0),
            "last_step": last_step,
            "peak_bytes": max(self._before, peak),
            "step_peak_bytes": peak,
            "step_ms": last_ms,
            "sites": [(it.file, it.line, it.function, it.node, it.most_bytes, it.most_alive) for it in sites],
            "stand_ins": [  # as `StandIn` has them
                (*key, count, stand_ins.values[key], sizes.at_peak_of(key))
                for key, count in stand_ins.counts.most_common()
            ],
            "uncertain_bytes": sizes.at_peak_of(None),
            "ended": ended,
            "cards": len(self._cards),
        }
        (self.folder / "run.json").write_text(json.dumps(found))
        self._report.write("end\n")
        self._report.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no handlers: they could write files from tensors that have no values

    def _time_traces(self) -> tuple[int, float | None]:
        """Replaces the recorded times by each card's. Returns the operators of the last step, and what they
        take on the first card, in ms."""
        with open(self._raw, encoding="utf-8") as file:
            lines = [line for line in file if not line.startswith(('{"ran"', '{"held"'))]
        begins = [json.loads(line)["time"] for line in lines if line.startswith('{"operator"')]
        first, end = (bisect.bisect(begins, it) for it in ([0.0, *self._ends_us])[-2:])
        steps = []
        for number, card in enumerate(self._cards):
            durations = durations_us(self.mode.timeline.kernels, begins, card.host_us, number)
            with open(self.folder / trace_name(number), "w", encoding="utf-8") as out:
                out.writelines(lines)
                out.writelines(
                    f'{{"ran": {at}, "operators": 1, "us": {us:.3f}}}\n' for at, us in enumerate(durations)
                )
            steps.append(sum(durations[first:end]) / 1e3)
        os.unlink(self._raw)
        return len(begins) - first, steps[0] if self._done >= 2 else None


def as_on_cuda() -> torch.library.Library:
    """Autocast, and fused dropout, which keeps a mask of bytes for the backward. The CPU keeps more."""

    def dropout(given: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return torch.native_dropout(given, p, train)[0] if train and p > 0 else given

    kernels = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernels that these replace
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            kernels.impl("dropout", dropout, key, allow_override=True)
        cast_as_on_cuda(kernels)
    return kernels


def _note_waits(timeline: Timeline) -> None:
    synchronize = torch.accelerator.synchronize

    def noted(*args: Any, **kwargs: Any) -> None:
        synchronize(*args, **kwargs)
        timeline.wait()

    torch.accelerator.synchronize = noted


def _devices() -> list[torch.device]:
    return [torch.device("emu", index) for index in range(torch.accelerator.device_count())]


def _peak() -> int:
    return max(map(max_memory_allocated, _devices()))


def _tell(error: BaseException, folder: Path) -> None:
    shown = without_our_frames(error.__traceback__)
    traceback.print_exception(type(error), error, shown)
    if isinstance(error, NoResult):
        message = str(error)
    elif isinstance(error, SystemExit):
        message = f"the script exited with status {error.code}, before the steps that a plan needs"
    else:
        message = _of_exception(error, traceback.extract_tb(shown))
    (folder / "error.json").write_text(json.dumps(message))


def _of_exception(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """What a script has raised, where, and what to do about it."""
    said = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    if len(said) > _LONGEST:
        said = said[:_LONGEST].rstrip() + "..."
    own = [it for it in frames if "site-packages" not in it.filename and not it.filename.startswith("<")]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    if any(word in said for word in _GPU_WORDS):
        todo = (
            "This needs a real GPU, and a dry run has none. Leave it out for the plan, or record a trace on "
            "a GPU and plan it with --from (docs/annex.md)"
        )
    else:
        todo = (
            "Run the script without plan: if it raises there too, correct it first; if not, "
            "docs/plan.md says what a dry run cannot give it"
        )
    return f"the script raised {said.rstrip('.')}{place}. {todo}"
