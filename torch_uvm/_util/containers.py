"""The tensors of what the hints take: a tensor, a module, an optimizer, or nested containers of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import show

ACCEPTED = "a tensor, a module, an optimizer, or nested lists, tuples and mappings of them"


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Of the state alone, where step counts and other plain values stand beside tensors."""
    waiting: list[Any] = [optimizer.state]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            members = list(value.values() if isinstance(value, Mapping) else value)
            waiting.extend(reversed(members))


def _members(value: Any) -> Iterator[tuple[str, Any]] | None:
    """What a container has, each with its place as the code writes it; None: it is no container."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", member) for key, member in value.items())
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", member) for index, member in enumerate(value))
    return None


def tensors_in(x: Any, function: str) -> list[torch.Tensor]:
    """Every tensor of `x`, once, in order. A container that holds itself is gone through once.

    Raises:
        TypeError: something in `x` is none of what is accepted; its place is named.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("x", x)]  # a stack, so that depth is no limit
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
            continue
        if isinstance(value, torch.nn.Module):
            found.update((id(t), t) for t in (*value.parameters(), *value.buffers()))
            continue
        if isinstance(value, torch.optim.Optimizer):
            found.update((id(t), t) for t in _state_of(value))
            continue
        members = _members(value)
        if members is None:
            raise TypeError(f"{function}(): {path} is {show(value)}; accepted: {ACCEPTED}")
        if id(value) not in seen:
            seen.add(id(value))
            waiting.extend(reversed([(path + place, member) for place, member in members]))
    return list(found.values())


def managed_tensors_in(x: Any, function: str) -> list[torch.Tensor]:
    """The managed ones of `tensors_in`.

    Raises:
        TypeError: as there.
        ValueError: `x` itself is a tensor that is not managed: nothing at all could be done.
    """
    if isinstance(x, torch.Tensor) and not _C.is_managed(x):
        raise ValueError(
            f"{function}() of a tensor of layout {x.layout} on {x.device} that is not managed; "
            f"torch_uvm.to(x, device, managed=True) makes a managed copy"
        )
    return [t for t in tensors_in(x, function) if _C.is_managed(t)]
