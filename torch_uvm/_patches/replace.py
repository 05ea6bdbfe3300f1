"""Functions of PyTorch that get a function of ours in their place, once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "_replaced_by_torch_uvm"


def replace_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Puts `wrap(plain)` in the place of `plain`, the function or property `name` of `owner`.

    A second call does nothing, also where Ctrl-C came between the first one and what its caller knows of it.
    """
    plain = getattr(owner, name)
    if hasattr(_function(plain), _MARK):
        return
    ours = wrap(plain)
    setattr(_function(ours), _MARK, True)
    setattr(owner, name, ours)


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else value
