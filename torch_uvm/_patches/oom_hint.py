"""A hint for a program that ends because plain device memory ran out, with torch_uvm imported and off.

On `emu` the error's message contains the hint, because the allocator is ours. On CUDA the allocator is
PyTorch's. Its error is unchanged while a program may still catch it; a hook prints the hint after the error
that ends the program. Allocations cost nothing extra, and the error's type and text stay.
"""

from __future__ import annotations

import sys
from types import TracebackType

import torch

from torch_uvm import _C

#: The same text as in the C++ code that raises the error on `emu`.
HINT = (
    "Managed memory is off. With it, a script may use more than the device has: "
    "python -m torch_uvm run SCRIPT"
)


def hint_at_the_end() -> None:
    """Installs the hook in front of the present one."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        if isinstance(error, torch.OutOfMemoryError) and not _C.is_enabled() and HINT not in str(error):
            print(HINT, file=sys.stderr)

    sys.excepthook = hook
