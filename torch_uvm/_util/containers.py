"""The tensors in arguments: of operators, hints and pins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import show

ACCEPTED = "a tensor, a module, an optimizer, or nested lists, tuples and mappings of them"


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """The tensors among values, lists, tuples and dictionaries, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(*value)
        elif isinstance(value, dict):
            found += tensors_of(*value.values())
    return found


def _leaves(x: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What nested lists, tuples and mappings hold, in order, each with its place as code writes it.

    A container that holds itself is visited once. Depth is not limited.
    """
    seen: set[int] = set()
    waiting = [(place, x)]
    while waiting:
        place, value = waiting.pop()
        if not isinstance(value, (Mapping, list, tuple)):
            yield place, value
        elif id(value) not in seen:
            seen.add(id(value))
            members = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting.extend(reversed([(f"{place}[{key!r}]", member) for key, member in members]))


def tensors_in(x: Any, function: str) -> list[torch.Tensor]:
    """Every tensor of `x`, once, in order.

    Args:
        x: what `ACCEPTED` says; of a module its parameters and buffers, of an optimizer its state.
        function: the caller's name, for the message.

    Raises:
        TypeError: something in `x` is not accepted; the message names its place.
    """
    found: list[torch.Tensor] = []
    for place, value in _leaves(x, "x"):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            found.extend((*value.parameters(), *value.buffers()))
        elif isinstance(value, torch.optim.Optimizer):
            # Step counts and other plain values are there beside tensors.
            found.extend(it for _, it in _leaves(value.state, "state") if isinstance(it, torch.Tensor))
        else:
            raise TypeError(f"{function}(): {place} is {show(value)}; accepted: {ACCEPTED}")
    return list({id(tensor): tensor for tensor in found}.values())


def managed_tensors_in(x: Any, function: str) -> list[torch.Tensor]:
    """The managed tensors of `tensors_in`.

    Raises:
        TypeError: as there.
        ValueError: `x` itself is a tensor that is not managed, so that there is nothing to do.
    """
    if isinstance(x, torch.Tensor) and not _C.is_managed(x):
        raise ValueError(
            f"{function}() of a tensor of layout {x.layout} on {x.device} that is not managed; "
            f"torch_uvm.to(x, device, managed=True) makes a managed copy"
        )
    return [t for t in tensors_in(x, function) if _C.is_managed(t)]
