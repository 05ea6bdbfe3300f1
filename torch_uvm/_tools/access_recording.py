"""Recordings of the storages that operators use: to plot, and to try policies on (docs/annex.md)."""

from __future__ import annotations

import os

import torch

from torch_uvm import _C
from torch_uvm._tools.recording import Recording
from torch_uvm._util.arguments import accelerator, exact_keywords, resolve_device
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.files import output_file


class AccessRecording(Recording):
    """What `record_accesses` returns: a context manager. `path` is the file, `stop()` completes it.

    `stop()` raises RuntimeError if the file could not be written; the file ends where that began.
    """

    _function = "torch_uvm.tools.record_accesses"

    def _begin(self) -> None:
        here = accelerator()
        if here is not None and _C.requested_budget(torch.accelerator.current_device_index()) is not None:
            # A device's first managed memory puts its budget in force.
            _C.empty_strided([1], [1], torch.uint8, resolve_device(here))
        _C.start_recording_accesses(str(self.path))

    def _end(self) -> None:
        _C.stop_recording_accesses()


@exact_keywords
@break_the_graph
def record_accesses(path: str | os.PathLike[str]) -> AccessRecording:
    """Starts to record which storages operators use, and which transfers that causes.

    There must be a budget: without one, operators are not observed. There is one recording at a time. It
    ends at `stop()`, at the end of a `with` block, or when the process exits.

    Record six steps or more. As long as everything fits, an idle device is made to wait from the third
    iteration on, two seconds in all at most, so that durations are the device's own.

    Args:
        path: a new file, or one to overwrite. The format is JSON lines (docs/annex.md);
            `python -m torch_uvm tools plot trace` and `torch_uvm.traces.read_trace` read it.

    Raises:
        TypeError: `path` is neither a string nor a path.
        FileNotFoundError, IsADirectoryError: the file's folder does not exist; `path` is a folder.
        RuntimeError: another recording is active.
        ValueError: no device has a budget.

    >>> with torch_uvm.tools.record_accesses("accesses.jsonl"):  # doctest: +SKIP
    ...     train_one_step()
    """
    return AccessRecording(output_file(path))
