"""Checks of the public functions' arguments, before anything changes.

Every error names the value received and the values accepted.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import torch

from torch_uvm import _C
from torch_uvm._util.compiler import run_as_it_is

Device: TypeAlias = "torch.device | str | int"

_F = TypeVar("_F", bound=Callable[..., Any])

#: The largest count of bytes that the extension accepts.
MAX_BYTES = 2**64 - 1
BYTE_FORMS = "a count of bytes such as 4096, or a string such as '4GiB' or '512 MB'"


def show(value: object) -> str:
    """`value` for an error message: its repr, truncated if it is long, and its type."""
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        return f"a storage of {value.nbytes()} bytes ({type(value).__name__})"  # its repr lists all bytes
    text = repr(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return f"{text} ({type(value).__name__})"


def check_flag(name: str, value: object, accepted: tuple[object, ...]) -> None:
    """Checks by identity, so that 1 is not taken for True.

    Raises:
        TypeError: `value` is none of `accepted`.
    """
    if not any(value is flag for flag in accepted):
        listed = ", ".join(map(repr, accepted))
        raise TypeError(f"{name} is {show(value)}; accepted: {listed}")


def check_word(name: str, value: object, accepted: tuple[str, ...]) -> None:
    """Checks an argument that is one of a few words.

    Raises:
        TypeError: `value` is no string.
        ValueError: it is another one.
    """
    *most, last = (f'"{word}"' for word in accepted)
    listed = f"{', '.join(most)} or {last}"
    if not isinstance(value, str):
        raise TypeError(f"{name} is {show(value)}; accepted: {listed}")
    if value not in accepted:
        raise ValueError(f"{name}={value!r}; accepted: {listed}")


def did_you_mean(word: str, accepted: Iterable[str]) -> str:
    """A suffix that suggests the accepted word most similar to `word`; empty if none is similar."""
    alike = difflib.get_close_matches(word, list(accepted), n=1)
    return f" (did you mean {alike[0]}?)" if alike else ""


def exact_keywords(function: _F) -> _F:
    """Decorates `function` to refuse unknown keywords with an error that names the accepted ones.

    A function with keyword-only parameters alone refuses positional arguments in the same way.
    """
    parameters = inspect.signature(function).parameters.values()
    accepted = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = frozenset(accepted)
    keywords_only = all(p.kind is p.KEYWORD_ONLY for p in parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                listed = f"accepted: {', '.join(accepted)}" if accepted else "it takes no arguments"
                raise TypeError(
                    f"{function.__name__}() has no keyword {name!r} (given {name}={show(kwargs[name])})"
                    f"{did_you_mean(name, accepted)}; {listed}"
                )
        if args and keywords_only:
            named = f"{accepted[0]}={args[0]!r}" if accepted else ""
            how = f"write {function.__name__}({named}); accepted: {', '.join(accepted)}"
            raise TypeError(
                f"{function.__name__}() takes {'keywords only' if accepted else 'no arguments'} "
                f"(given {show(args[0])}){'; ' + how if accepted else ''}"
            )
        return function(*args, **kwargs)

    return run_as_it_is(checked)  # type: ignore[return-value]


def whole_number(value: object, what: str, low: int, high: int, accepted: str = "an int") -> int:
    """`value` as an int.

    Raises:
        TypeError: `value` is no int (a bool, a float).
        ValueError: it is out of range.
    """
    accepted = f"{accepted}, from {low} to {high}"
    try:
        number = operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} is {show(value)}; accepted: {accepted}") from None
    if not low <= number <= high:
        raise ValueError(f"{what} is {number}; accepted: {accepted}")
    return number


def byte_count(value: object, what: str, also: str = "") -> int:
    """`value` as a count of bytes.

    Raises:
        TypeError: `value` is neither an int nor a string (a bool, a float).
        ValueError: it is negative, does not parse, or does not fit 64 bits.
    """
    accepted = BYTE_FORMS + also
    if isinstance(value, str):
        try:
            return _C.parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{what}={value!r}: {error}; accepted: {accepted}") from None
    return whole_number(value, what, 0, MAX_BYTES, accepted)


def is_word(value: object, word: str) -> bool:
    """Whether `value` is that word as the option table reads it."""
    return isinstance(value, str) and value.strip().lower() == word


def limit_bytes(value: object, what: str = "limit", also: str = "") -> int | None:
    """A limit in bytes; None for no limit, which is also spelled "none"."""
    if value is None or is_word(value, "none"):
        return None
    return byte_count(value, what, also=f'{also}, or None ("none")')


def accelerator() -> torch.device | None:
    """The current accelerator, without an index; None where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def accepted_devices() -> str:
    """The devices that memory can be on here, as error messages list them."""
    here = accelerator()
    if here is None:
        return "'cpu' (there is no accelerator)"
    count = torch.accelerator.device_count()
    if count == 1:
        return f"'cpu', '{here.type}', '{here.type}:0' or the index 0"
    last = count - 1
    return f"'cpu', '{here.type}', '{here.type}:0' to '{here.type}:{last}' or an index from 0 to {last}"


def resolve_device(device: Any, what: str = "device") -> torch.device:
    """The device that an argument names, with its index.

    Args:
        device: a torch.device, a string, or the accelerator's index. The CPU means the host. A device
            without an index is the accelerator's current device.
        what: the argument's name, for messages.

    Raises:
        TypeError: `device` is none of these.
        ValueError: there is no such device, or managed memory cannot be on it.
    """
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"{what} is {show(device)}; accepted: {accepted_devices()}")
    here = accelerator()
    try:
        if isinstance(device, int):
            if here is None or not 0 <= device < torch.accelerator.device_count():
                raise RuntimeError("no such index")  # torch.device would take the last eight bits of it
            meant = torch.device(here.type, device)
        else:
            meant = torch.device(device)
    except RuntimeError:  # torch does not know the string, or cannot hold the index
        raise ValueError(f"{what} is {show(device)}; accepted: {accepted_devices()}") from None
    if meant.type == "cpu" and meant.index in (None, 0):
        return torch.device("cpu")
    if here is None or meant.type != here.type:
        raise ValueError(f"{what} is {show(device)}; accepted: {accepted_devices()}")
    index: int | None = meant.index  # torch's stubs omit that it may be None
    if index is None:
        return torch.device(here.type, torch.accelerator.current_device_index())
    if not 0 <= index < torch.accelerator.device_count():
        raise ValueError(f"{what} is {show(device)}; accepted: {accepted_devices()}")
    return meant


def resolve_home(device: Device | None) -> torch.device | None:
    """The home that an argument of a memory function names; None: all homes together."""
    return None if device is None else resolve_device(device)
