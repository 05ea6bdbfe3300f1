"""A hint in a program that ends for want of plain device memory, while torch_uvm is imported and off.

The allocator of `emu` is ours: its message has the hint. CUDA's is PyTorch's, and its error is left as it is
while a program may still catch it: the hint is a note on the error that ends the program, added by the hook
that prints it. An allocation costs nothing more, and the error's type and text stay.
"""

from __future__ import annotations

import sys
from types import TracebackType

import torch

from torch_uvm import _C

#: As csrc/tensor/storage/managed_storage.cpp has it.
HINT = (
    "Managed memory is off. With it, a script may use more than the device has: "
    "python -m torch_uvm run SCRIPT"
)


def hint_at_the_end() -> None:
    """Puts the hook in place, before the one that is there."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, torch.OutOfMemoryError) and not _C.is_enabled() and HINT not in str(error):
            error.add_note(HINT)
        before(kind, error, traceback)

    sys.excepthook = hook
