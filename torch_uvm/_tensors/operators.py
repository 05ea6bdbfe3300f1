"""Fake kernels and batching rules of the operators in torch.ops.torch_uvm, for tracers and transforms.

move(Tensor(a) self, Device device, bool non_blocking=False) -> Tensor(a)

managed_copy(Tensor self, Device device, ScalarType dtype, bool non_blocking,
             MemoryFormat memory_format) -> Tensor

`torch_uvm.to` calls `move` if the bytes are shared; `move` refuses tensors that are not managed.
`managed_copy` is its functional form: it returns new managed memory. Functionalisation and torch.export
accept it.
"""

from __future__ import annotations

from typing import Any

import torch


def _check(x: torch.Tensor, what: str) -> None:
    if x.device.type == "meta":
        raise ValueError(f"{what} of a meta tensor, which has no bytes; accepted: strided tensors with bytes")


def _fake_move(x: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    """Same sizes, strides and offset, under the other label.

    Two fake tensors cannot share a storage across devices, so the result does not alias `x`. The schema
    declares the alias, and functionalisation refuses the operator because of it.
    """
    _check(x, "a move")
    bytes_behind = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device=device)
    moved = bytes_behind.as_strided(x.size(), x.stride(), x.storage_offset())
    torch._C._set_conj(moved, x.is_conj())
    torch._C._set_neg(moved, x.is_neg())
    return moved


def _fake_managed_copy(
    x: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    non_blocking: bool,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    _check(x, "a managed copy")
    return torch.empty_like(x, device=device, dtype=dtype, memory_format=memory_format)


def _batched_move(
    info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, device: torch.device, non_blocking: bool = False
) -> tuple[torch.Tensor, int | None]:
    return torch.ops.torch_uvm.move(x, device, non_blocking), in_dims[0]


def _batched_managed_copy(
    info: Any,
    in_dims: tuple[Any, ...],
    x: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    non_blocking: bool,
    memory_format: torch.memory_format,
) -> tuple[torch.Tensor, int | None]:
    dim = in_dims[0]
    if memory_format is torch.contiguous_format and dim is not None:
        x, dim = x.movedim(dim, 0), 0
    elif memory_format is not torch.preserve_format:
        raise ValueError(
            f"memory_format={memory_format} under vmap; accepted: torch.preserve_format, "
            "torch.contiguous_format"
        )
    copy = torch.ops.torch_uvm.managed_copy(x, device, dtype, non_blocking, memory_format)
    return copy, dim


def register_rules() -> None:
    """Registers fake kernels and batching rules; called once, by `import torch_uvm`."""
    torch.library.register_fake("torch_uvm::move", _fake_move)
    torch.library.register_fake("torch_uvm::managed_copy", _fake_managed_copy)
    torch.library.register_vmap("torch_uvm::move", _batched_move)
    torch.library.register_vmap("torch_uvm::managed_copy", _batched_managed_copy)
