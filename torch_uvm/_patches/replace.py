"""Replacing a function or property of PyTorch, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "_replaced_by_torch_uvm"


def replace_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces `plain`, the function or property `name` of `owner`, by `wrap(plain)`.

    A second call does nothing, even if Ctrl-C interrupted the caller after the first one. A function that is
    replaced twice for two purposes needs one wrapper for both.
    """
    plain = getattr(owner, name)
    if hasattr(_function(plain), _MARK):
        return
    ours = wrap(plain)
    setattr(_function(ours), _MARK, True)
    setattr(owner, name, ours)


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else value
