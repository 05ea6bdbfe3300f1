"""torch_uvm: unchanged PyTorch scripts that use more memory than their accelerator has.

With the switch on (`enable`, or TORCH_UVM=1 in the environment) the memory of new tensors on the accelerator
is *managed*: addressable by the CPU and by every device, and bounded by the host's memory or a limit instead
of the device's. Where there is no GPU, an emulated accelerator, `emu`, takes its place.

>>> import torch, torch_uvm
>>> torch_uvm.enable(limit="4GiB")
>>> x = torch.ones(1024, device=torch.accelerator.current_accelerator())
>>> torch_uvm.is_managed(x)
True

The import reads the environment (TORCH_UVM_CONF and others), registers the emulated accelerator if there is
no GPU (or with TORCH_UVM_DEVICE=emu), and turns the switch on if TORCH_UVM or PYTORCH_ENABLE_UNIFIED_MEMORY
request it. An unknown value fails the import with an error that names it. Of PyTorch it replaces next to
nothing: torch_uvm/_patches/README.md lists what is replaced when.
"""

from __future__ import annotations

import pkgutil
import warnings
from typing import TYPE_CHECKING

from torch_uvm._util.cli_errors import end_as_command

try:
    import torch
except ImportError as error:
    end_as_command(f"it needs torch, which does not load: {error}")
    raise

from torch_uvm._util.native import search_path

try:
    __path__[:0] = search_path(torch.__version__, torch.version.cuda)
    from torch_uvm import _C  # noqa: F401  (here, so that a failure can be explained)
except ImportError as error:
    explained = (
        f"torch_uvm's extension does not load: {error}. An extension fits one minor version of torch (this "
        f"is torch {torch.__version__}); build one from source with `pip install --no-build-isolation`."
    )
    end_as_command(explained)
    raise ImportError(explained) from error

from torch_uvm import allocators, emulated, memory, tools
from torch_uvm._allocators.statistics import mem_get_info, memory_summary
from torch_uvm._dry.estimates import estimate_memory
from torch_uvm._environment import apply_environment
from torch_uvm._patches.aliased_inputs import watch_dynamo
from torch_uvm._patches.oom_hint import hint_at_the_end
from torch_uvm._patches.tensor_to import accept_managed_keyword
from torch_uvm._residency.budget import get_budget, set_budget, stats
from torch_uvm._residency.hints import advise, discard, prefetch, residency
from torch_uvm._residency.limits import set_host_limit, set_limit
from torch_uvm._residency.pins import keep_resident, resident
from torch_uvm._residency.steps import step
from torch_uvm._residency.uses import uses
from torch_uvm._switch.switch import disable, disabled, enable, enabled, is_enabled
from torch_uvm._tensors.moves import is_managed, move_or_copy, to
from torch_uvm._tensors.operators import register_rules
from torch_uvm._util.version import VERSION

__all__ = [
    "advise",
    "disable",
    "disabled",
    "discard",
    "emulated",
    "enable",
    "enabled",
    "estimate_memory",
    "get_budget",
    "is_enabled",
    "is_managed",
    "keep_resident",
    "mem_get_info",
    "memory_summary",
    "prefetch",
    "residency",
    "resident",
    "set_budget",
    "set_host_limit",
    "set_limit",
    "stats",
    "step",
    "to",
    "uses",
]


# Of version 0.1.
_RENAMED = {name: f"{it.__name__}.{name}" for it in (memory, tools, allocators) for name in it.__all__} | {
    "accesses": "torch_uvm.tools",
    "allocations": "torch_uvm.tools",
    "arenas": "torch_uvm.allocators",
    "keep": "torch_uvm.memory",
    "plans": "torch_uvm.allocators",
    "residency_stats": "torch_uvm.stats",
}

if not TYPE_CHECKING:  # a type checker is to refuse old names

    def __getattr__(name: str) -> object:
        if name not in _RENAMED:
            raise AttributeError(f"module 'torch_uvm' has no attribute {name!r}")
        warnings.warn(f"torch_uvm.{name} is now {_RENAMED[name]}", FutureWarning, stacklevel=2)
        return pkgutil.resolve_name(_RENAMED[name])


__version__ = VERSION

try:
    apply_environment()
except (ValueError, RuntimeError) as error:
    end_as_command(error)
    raise
register_rules()  # once the import cannot fail any more: torch 2.12 refuses to register a rule again
watch_dynamo()
accept_managed_keyword(move_or_copy)
hint_at_the_end()
del accept_managed_keyword, apply_environment, end_as_command, hint_at_the_end
del VERSION, move_or_copy, register_rules, search_path, watch_dynamo
