"""Replacing a function or property of PyTorch, once."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torch_uvm import _C

#: What replaced something else, by its place, where it is another object.
_ours: dict[tuple[Any, str], Any] = {}

#: What was to be replaced, by name, and whether this torch has it.
there: dict[str, bool] = {}


def found(owner: Any, name: str) -> Any:
    """The function or property `name` of `owner`, which is to be replaced.

    None, with one warning, if this torch does not have it: what it was for is off, and the rest works.
    """
    plain = getattr(owner, name, None)
    title = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    if plain is None and there.get(title, True):
        warnings.warn(
            f"torch {torch.__version__} has no {title}, which torch_uvm replaces; what that is for is off "
            "(torch_uvm/_patches/README.md)",
            stacklevel=3,
        )
    there[title] = plain is not None
    return plain


def replace_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces `plain`, the function or property `name` of `owner`, by `wrap(plain)`.

    Functions in C and functions of `torch.Tensor` stay the same objects, and call the replacement: programs
    may have imported them before, and subclasses of `torch.Tensor` compare them with the `func` that
    `__torch_function__` receives.

    A second call does nothing, even if Ctrl-C interrupted the caller after the first one. A function that is
    replaced twice for two purposes needs one wrapper for both. Warns of what this torch does not have.
    """
    plain = found(owner, name)
    if plain is None:
        return
    if isinstance(plain, (types.MethodDescriptorType, types.BuiltinFunctionType)):
        _C.replace_function(plain, wrap)
    elif owner is torch.Tensor:
        _replace_body(plain.fget if isinstance(plain, property) else plain, wrap)
    elif plain is not _ours.get((owner, name)):
        _ours[owner, name] = wrap(plain)
        setattr(owner, name, _ours[owner, name])


def _body(*args: Any, **kwargs: Any) -> Any:
    replacement: Any = "replacement"
    return replacement(*args, **kwargs)


def _replace_body(function: Any, wrap: Callable[[Any], Any]) -> None:
    """Makes a function in Python call `wrap(plain)`, where `plain` does what it did before."""
    before, body = function.__code__, _body.__code__
    if before.co_filename == body.co_filename:
        return
    plain = types.FunctionType(
        before, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    plain.__kwdefaults__ = function.__kwdefaults__
    plain.__doc__ = function.__doc__
    constants = {"replacement": wrap(plain)}
    function.__wrapped__ = plain  # its signature
    function.__code__ = body.replace(
        co_consts=tuple(constants.get(each, each) for each in body.co_consts),
        co_freevars=before.co_freevars,
    )
