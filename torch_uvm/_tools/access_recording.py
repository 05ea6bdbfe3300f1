"""Recordings of what operators used: a file to draw and to judge policies by (docs/traces.md)."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from types import TracebackType

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import accelerator, exact_keywords, resolve_device
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.files import output_file

_lock = threading.Lock()
_recording: AccessRecording | None = None


class AccessRecording:
    """What `record_accesses` returns: a context manager; `stop()` completes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stop(self) -> None:
        """Completes the file. Doing it again, or at exit, does nothing.

        Raises:
            RuntimeError: the file could not be written; it ends where that began.
        """
        global _recording
        with _lock:
            if _recording is not self:
                return
            _recording = None
            atexit.unregister(self.stop)
            _C.stop_recording_accesses()

    def __enter__(self) -> AccessRecording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"torch_uvm.record_accesses({str(self.path)!r})"


@exact_keywords
@break_the_graph
def record_accesses(path: str | os.PathLike[str]) -> AccessRecording:
    """Starts to write down which storages operators use, and what is moved because of it.

    Needs a budget: without one nobody watches. One recording at a time; it ends at `stop()`, at the end of
    a `with` block, or when the process exits.

    Args:
        path: a new file, or one that is overwritten: JSON lines, as docs/traces.md has them. What reads it:
            `python -m torch_uvm plot trace`.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError, IsADirectoryError: its folder does not exist; it is a folder.
        RuntimeError: another recording is going on.
        ValueError: no device has a budget.

    >>> with torch_uvm.record_accesses("accesses.jsonl"):  # doctest: +SKIP
    ...     train_one_step()
    """
    global _recording
    file = output_file(path)
    with _lock:
        if _recording is not None:
            raise RuntimeError(f"{_recording!r} is going on; one recording at a time: stop() that one first")
        here = accelerator()
        if here is not None and _C.requested_budget(torch.accelerator.current_device_index()) is not None:
            # Budgets come into force with a device's first managed memory.
            _C.empty_strided([1], [1], torch.uint8, resolve_device(here))
        _C.start_recording_accesses(str(file))
        _recording = AccessRecording(file)
        atexit.register(_recording.stop)
        return _recording
