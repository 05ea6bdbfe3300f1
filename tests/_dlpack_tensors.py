"""Managed tensors for tests of DLPack and of other processes; the address and the labels of their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import torch_uvm


def managed(*size: int, device: str | None = None) -> torch.Tensor:
    """The numbers 0, 1, 2, ..., by default on the accelerator."""
    return torch_uvm.memory.empty(*size, device=device).copy_(
        torch.arange(torch.Size(size).numel()).reshape(size)
    )


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def labels(x: torch.Tensor) -> int:
    return torch_uvm._C.label_count(x.untyped_storage())
