"""Recordings of allocations: files to look at, and to replay on other allocators (docs/annex.md)."""

from __future__ import annotations

import os

from torch_uvm import _C
from torch_uvm._tools.recording import Recording
from torch_uvm._util.arguments import accelerator, exact_keywords, resolve_device
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.files import output_file


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
