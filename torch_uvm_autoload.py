"""The `torch.backends` entry point: what PyTorch calls at the end of `import torch`.

It lies outside the package on purpose: loading an entry point of `torch_uvm` would import `torch_uvm`,
and with it the extension, into every program of the environment. This module costs a look at three
environment variables, and imports the package only when one of them asks for it.
"""

from __future__ import annotations

import os
import warnings

#: Values that leave the switch off; all others are for torch_uvm to judge.
_OFF = frozenset({"", "0", "false", "off"})


def autoload() -> None:
    """Imports torch_uvm if TORCH_UVM, PYTORCH_ENABLE_UNIFIED_MEMORY or TORCH_UVM_DEVICE ask for it.

    When torch is being imported *by* torch_uvm, the import below finds the half-made package and
    returns at once; torch_uvm goes on when torch is there. If the import fails, as with a torch that no
    extension was built for, it warns: `import torch` has to work.
    """
    names = ("TORCH_UVM", "PYTORCH_ENABLE_UNIFIED_MEMORY", "TORCH_UVM_DEVICE")
    asking = [name for name in names if os.environ.get(name, "").strip().lower() not in _OFF]
    if asking:
        try:
            import torch_uvm  # noqa: F401
        except ImportError as error:
            warnings.warn(f"{asking[0]} is set, but torch_uvm is not in use: {error}", stacklevel=2)
