"""When the patches are installed: README.md in this folder lists them.

`import torch_uvm` adds `managed=` to `Tensor.to`, and has Dynamo's graphs look at their inputs. The rest is
installed before the first managed tensor exists, or before the first budget.
"""

from __future__ import annotations

import threading

from torch_uvm import _C
from torch_uvm._patches import deferred_updates, multiprocessing, pointer_escapes
from torch_uvm._patches.compiled_graphs import watch_graphs
from torch_uvm._patches.dlpack import export_managed_memory
from torch_uvm._patches.optimizer_steps import mark_optimizer_steps
from torch_uvm._patches.triton_launches import watch_launches

_lock = threading.RLock()
_installed = False


def for_managed_tensors() -> None:
    """Installs what a program with managed tensors needs. Calling it again does nothing.

    Every Python function that can make the first managed tensor calls it: `enable`, the scopes, the factories
    and `to`. Budgets and a deferred optimizer that TORCH_UVM_CONF asks for take effect here.
    """
    global _installed
    if _installed:
        return
    with _lock:  # two threads may install at once, and Ctrl-C may come between: each part is idempotent
        export_managed_memory()
        pointer_escapes.pin_exports()
        multiprocessing.send_copies()
        multiprocessing.refuse_shared_labels()
        watch_graphs()
        watch_launches()
        if _C.requested_budget(0) not in (None, "none"):
            for_budgets()
        if deferred_updates.chosen() != "in_place":
            deferred_updates.choose(deferred_updates.chosen())
        _installed = True


def for_budgets() -> None:
    """Installs what a budget needs: the engine moves bytes from now on. Calling it again does nothing."""
    pointer_escapes.watch()
    mark_optimizer_steps()
