"""PyTorch's own calls that change a tensor's device, and what they mean here: `Tensor.to(managed=)`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_uvm.arguments import resolve_device
from torch_uvm.moves import check_flag, plain_to, tensor_to


def _parse(x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call of Tensor.to means: device, dtype, copy, non_blocking, memory_format."""
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    where = x.device if device is None else resolve_device(device)
    return where, dtype, copy, non_blocking, memory_format or torch.preserve_format


@functools.wraps(plain_to)
def _to_with_managed(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    managed = kwargs.pop("managed", None)
    if managed is None:
        return plain_to(self, *args, **kwargs)
    check_flag("managed", managed, (True, False, None))
    device, dtype, copy, non_blocking, memory_format = _parse(self, args, dict(kwargs))
    return tensor_to(self, device, dtype, managed, copy, non_blocking, memory_format)


def accept_managed_keyword() -> None:
    """Adds `managed=` to torch.Tensor.to, whatever the switch says; called by `import torch_uvm`."""
    if torch.Tensor.to is not _to_with_managed:
        torch.Tensor.to = _to_with_managed  # type: ignore[method-assign, assignment]
