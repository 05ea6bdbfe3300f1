"""Public names of an earlier version, which work with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping


def renamed(name: str, places: Mapping[str, str]) -> object:
    """What is now elsewhere, with a warning.

    Args:
        places: full names of what has moved, by its name in the package.

    Raises:
        AttributeError: no such name was public.
    """
    if name not in places:
        raise AttributeError(f"module 'torch_uvm' has no attribute {name!r}")
    warnings.warn(f"torch_uvm.{name} is now {places[name]}", FutureWarning, stacklevel=3)
    module, _, last = places[name].rpartition(".")
    found: object = getattr(importlib.import_module(module), last)
    return found
