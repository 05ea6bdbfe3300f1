"""Managed tensors for tests of moves. Their names hold on every accelerator."""

from __future__ import annotations

import torch

import torch_uvm

CPU = torch.device("cpu")
managed_copy = torch.ops.torch_uvm.managed_copy


def managed(*size: int, device: str | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers 1, 2, 3, ..., by default on the accelerator."""
    count = torch.Size(size).numel()
    return torch_uvm.memory.empty(*size, device=device, dtype=dtype).copy_(
        torch.arange(count).reshape(size) + 1
    )


def to_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch_uvm.to(x, "cpu")


def to_copy(x: torch.Tensor, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    result: torch.Tensor = managed_copy(
        x, torch.device(device), dtype or x.dtype, False, torch.preserve_format
    )
    return result
