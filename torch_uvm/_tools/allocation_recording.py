"""Recordings of allocations: a file to look at, and to replay on other allocators (docs/replay.md)."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from types import TracebackType

from torch_uvm import _C
from torch_uvm._util.arguments import accelerator, exact_keywords, resolve_device
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.files import output_file

_lock = threading.Lock()
_recording: AllocationRecording | None = None


class AllocationRecording:
    """What `record_allocations` returns: a context manager; `stop()` completes the file.

    `rows` is None while it goes on, and then the count of rows that the file has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: int | None = None

    def stop(self) -> None:
        """Completes the file. Doing it again, or at exit, does nothing; nor does it in a forked child.

        Raises:
            RuntimeError: the file could not be written; it ends with the last row that could, and the error
                says how many are missing.
        """
        global _recording
        with _lock:
            if _recording is not self:
                return
            _recording = None
            atexit.unregister(self.stop)
            self.rows, _, error = _C.stop_recording_allocations()
            if error:
                raise RuntimeError(error)

    def __enter__(self) -> AllocationRecording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"torch_uvm.record_allocations({str(self.path)!r})"


@exact_keywords
@break_the_graph
def record_allocations(path: str | os.PathLike[str]) -> AllocationRecording:
    """Starts to write down every allocation and free of managed memory, by any thread.

    What the process's allocator gives out and takes back: tensors of all homes, what the residency engine
    fetches, segments of other allocators that stand on it. One recording at a time; it ends at `stop()`, at
    the end of a `with` block, or when the process exits. Forked children are not recorded. While nobody
    records, an allocation costs what it did.

    Args:
        path: a new file, or one that is overwritten: CSV with the columns of RMM's logs,
            `Thread,Time,Action,Pointer,Size,Stream` (docs/replay.md). Sizes are bytes as asked for, times the
            local time of day to the microsecond. What reads it: `python -m torch_uvm replay`,
            `torch_uvm.allocation_logs.read_log`, RMM's own replay.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError, IsADirectoryError: its folder does not exist; it is a folder.
        RuntimeError: another recording is going on; there is no device to manage memory for.
        ValueError: the file cannot be made.

    >>> with torch_uvm.record_allocations("allocations.csv"):  # doctest: +SKIP
    ...     train_one_step()
    """
    global _recording
    file = output_file(path)
    with _lock:
        if _recording is not None:
            raise RuntimeError(f"{_recording!r} is going on; one recording at a time: stop() that one first")
        here = accelerator()
        if here is not None:
            _C.start_device(resolve_device(here))
        _C.start_recording_allocations(str(file))
        _recording = AllocationRecording(file)
        atexit.register(_recording.stop)
        return _recording
