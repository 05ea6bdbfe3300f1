"""Recordings of accesses and of allocations: files to look at, to plan from and to replay (docs/annex.md).

There is one of each kind at a time. It is completed at the end of a `with` block or at exit.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import accelerator, exact_keywords, resolve_device
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.files import output_file

if TYPE_CHECKING:
    from typing_extensions import Self


_lock = threading.Lock()
_active: dict[type[Recording], Recording] = {}


class Recording:
    """A file that is being written, from its construction until `stop()`.

    Raises:
        RuntimeError: another recording of this kind is active.
    """

    _function: ClassVar[str]  #: the public function that starts it, for messages

    def __init__(self, path: Path) -> None:
        self.path = path
        with _lock:
            if (active := _active.get(type(self))) is not None:
                raise RuntimeError(f"{active!r} is active; one recording at a time: stop() that one first")
            self._begin()
            _active[type(self)] = self
            atexit.register(self.stop)

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Completes the file. A second call does nothing."""
        with _lock:
            if _active.get(type(self)) is not self:
                return
            del _active[type(self)]
            atexit.unregister(self.stop)
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{self._function}({str(self.path)!r})"


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
        _C.stop_recording_accesses()  # of a recording that Ctrl-C has ended only in part
        _C.start_recording_accesses(str(self.path))

    def _end(self) -> None:
        _C.stop_recording_accesses()


@exact_keywords
@break_the_graph
def record_accesses(path: str | os.PathLike[str]) -> AccessRecording:
    """Starts to record which storages operators use, and which transfers that causes.

    There must be a budget: without one, operators are not observed. There is one recording at a time. It
    ends at `stop()`, at the end of a `with` block, or when the process exits.

    Record six steps or more. As long as everything fits, a device that has caught up with the host waits a
    millisecond each time, from the third iteration on, so that durations are the device's own.

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


class AllocationRecording(Recording):
    """What `record_allocations` returns: a context manager. `path` is the file, `stop()` completes it.

    `rows` is None while the recording is active, and afterwards the number of rows in the file. `stop()`
    raises RuntimeError if the file could not be written; the file ends with a whole row, and the error says
    how many are missing. In a forked child it does nothing.
    """

    _function = "torch_uvm.tools.record_allocations"
    rows: int | None = None

    def _begin(self) -> None:
        here = accelerator()
        if here is not None:
            _C.start_device(resolve_device(here))
        _C.stop_recording_allocations()  # of a recording that Ctrl-C has ended only in part
        _C.start_recording_allocations(str(self.path))

    def _end(self) -> None:
        self.rows, _, error = _C.stop_recording_allocations()
        if error:
            raise RuntimeError(error)


@exact_keywords
@break_the_graph
def record_allocations(path: str | os.PathLike[str]) -> AllocationRecording:
    """Starts to record every allocation and free of managed memory, by any thread.

    The process's allocator is recorded: tensors of all homes, blocks that the residency engine fetches to,
    and segments of other allocators. There is one recording at a time. It ends at `stop()`, at the end of a
    `with` block, or when the process exits. Forked children are not recorded.

    Args:
        path: a new file, or one to overwrite. The format is CSV with the columns of RMM's logs,
            `Thread,Time,Action,Pointer,Size,Stream` (docs/annex.md). `python -m torch_uvm tools replay`,
            `torch_uvm.allocation_logs.read_log` and RMM's own replay read it.

    Raises:
        TypeError: `path` is neither a string nor a path.
        FileNotFoundError, IsADirectoryError: the file's folder does not exist; `path` is a folder.
        RuntimeError: another recording is active; there is no device to manage memory for.
        ValueError: the file cannot be created.

    >>> with torch_uvm.tools.record_allocations("allocations.csv"):  # doctest: +SKIP
    ...     train_one_step()
    """
    return AllocationRecording(output_file(path))
