"""Replacing a function or property of PyTorch, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: What replaced something else, by its place. A method in C takes no mark of ours.
_ours: dict[tuple[Any, str], Any] = {}


def replace_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces `plain`, the function or property `name` of `owner`, by `wrap(plain)`.

    A second call does nothing, even if Ctrl-C interrupted the caller after the first one. A function that is
    replaced twice for two purposes needs one wrapper for both.
    """
    plain = getattr(owner, name)
    if plain is _ours.get((owner, name)):
        return
    _ours[owner, name] = wrap(plain)
    setattr(owner, name, _ours[owner, name])
