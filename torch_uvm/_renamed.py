"""Public names of version 0.1, which work with a warning in 0.2."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch_uvm import allocators, memory, tools

#: What has moved, by its old name.
RENAMED = {
    name: f"{module.__name__}.{name}" for module in (memory, tools, allocators) for name in module.__all__
}
RENAMED |= {
    "accesses": "torch_uvm.tools",
    "allocations": "torch_uvm.tools",
    "arenas": "torch_uvm.allocators",
    "keep": "torch_uvm.memory",
    "plans": "torch_uvm.allocators",
    "residency_stats": "torch_uvm.stats",
}


def renamed(name: str) -> Any:
    """What is now elsewhere, with a warning.

    Raises:
        AttributeError: no such name was public.
    """
    if name not in RENAMED:
        raise AttributeError(f"module 'torch_uvm' has no attribute {name!r}")
    warnings.warn(f"torch_uvm.{name} is now {RENAMED[name]}", FutureWarning, stacklevel=3)
    module, _, last = RENAMED[name].rpartition(".")
    found = importlib.import_module(module)
    return getattr(found, last)
