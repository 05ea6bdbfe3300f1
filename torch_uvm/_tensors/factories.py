"""Factories of tensors that are managed whether the switch is on or off.

The functions take sizes as their namesakes in torch do, as varargs or as one sequence. `device` differs: None
means the current accelerator, and "cpu" makes a managed CPU tensor. Torch's own function checks the
arguments: it makes a meta tensor, which says the sizes, strides and dtype of the managed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._allocators.allocator import Allocator, made_by
from torch_uvm._patches import install
from torch_uvm._util.arguments import Device, accelerator, exact_keywords, resolve_device, show


def _make(
    function: Callable[..., torch.Tensor],
    args: Sequence[Any],
    fill: complex | None,
    device: Device | None,
    allocator: Allocator | None,
    **options: Any,
) -> torch.Tensor:
    """A managed tensor like the one that a function of torch makes.

    Args:
        args, options: of the function.
        fill: the value of its elements. None: they have none.
    """
    what = function.__name__
    meta = function(*args, device="meta", **options)
    if meta.layout is not torch.strided or meta.is_quantized:
        raise ValueError(f"{what}() of layout {meta.layout} and dtype {meta.dtype}; accepted: dense tensors")
    here = accelerator() if device is None else device
    if here is None:
        raise ValueError(f"{what}(): device is None and there is no accelerator; accepted: 'cpu'")
    place = resolve_device(here)
    install.for_managed_tensors()
    with made_by(allocator, place, what) or nullcontext():
        made = _C.empty_strided(list(meta.size()), list(meta.stride()), meta.dtype, place)
    if fill is not None:
        made.fill_(fill)
    return made.requires_grad_(meta.requires_grad)


@exact_keywords
def empty(
    *sizes: Any,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    requires_grad: bool = False,
    allocator: Allocator | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """A managed tensor of that size, with uninitialised values.

    Args:
        sizes: ints, or one sequence of them; `()` for 0 dimensions. 0 is a valid size.
        dtype: None for torch's default.
        device: None for the current accelerator; a device, a string or the accelerator's index; "cpu" for a
            managed CPU tensor.
        requires_grad, memory_format: as in torch.empty.
        allocator: where the memory comes from; None for the allocator of the enclosing `use_allocator`, else
            the process's own.

    Raises:
        TypeError, ValueError, RuntimeError: a value that is not accepted (sizes below 0, a meta device, a
            quantised dtype, a device that the allocator does not serve). Nothing has changed.
        torch.OutOfMemoryError: beyond the limit, or beyond what the host has available.

    >>> torch_uvm.memory.empty(2, 3, device="cpu").shape
    torch.Size([2, 3])
    """
    options = {"requires_grad": requires_grad, "memory_format": memory_format}
    return _make(torch.empty, sizes, None, device, allocator, dtype=dtype, **options)


@exact_keywords
def zeros(
    *sizes: Any,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    requires_grad: bool = False,
    allocator: Allocator | None = None,
) -> torch.Tensor:
    """A managed tensor of zeros; arguments and errors as those of `empty`.

    >>> torch_uvm.memory.zeros(2, device="cpu")
    tensor([0., 0.])
    """
    return _make(torch.zeros, sizes, 0, device, allocator, dtype=dtype, requires_grad=requires_grad)


@exact_keywords
def ones(
    *sizes: Any,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    requires_grad: bool = False,
    allocator: Allocator | None = None,
) -> torch.Tensor:
    """A managed tensor of ones; arguments and errors as those of `empty`.

    >>> torch_uvm.memory.ones(2, device="cpu")
    tensor([1., 1.])
    """
    return _make(torch.ones, sizes, 1, device, allocator, dtype=dtype, requires_grad=requires_grad)


@exact_keywords
def full(
    size: Sequence[int],
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    requires_grad: bool = False,
    allocator: Allocator | None = None,
) -> torch.Tensor:
    """A managed tensor of `fill_value`; other arguments and errors as those of `empty`.

    Args:
        size: a sequence of ints.
        fill_value: a number. Without `dtype` it determines the dtype, as in torch.full: bool, int64, the
            default dtype for a float, and the corresponding complex dtype.

    Raises:
        ValueError: `fill_value` does not fit `dtype`.

    >>> torch_uvm.memory.full((2,), 7, device="cpu")
    tensor([7, 7])
    """
    try:
        torch.full((), fill_value, dtype=dtype, device="cpu")
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"full() fill_value is {show(fill_value)}: {error}") from None
    return _make(
        torch.full,
        (size, fill_value),
        fill_value,
        device,
        allocator,
        dtype=dtype,
        requires_grad=requires_grad,
    )


@exact_keywords
def empty_like(
    input: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    requires_grad: bool = False,
    allocator: Allocator | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """A managed tensor of the size of `input`; its values are whatever was in the memory.

    Args:
        input: a strided tensor, managed or not.
        dtype, device: None for those of `input`.
        memory_format: torch.preserve_format keeps the strides of dense tensors, as torch.empty_like.
        requires_grad, allocator: as those of `empty`.

    Raises:
        TypeError, ValueError, RuntimeError: as `empty`; also for a sparse, quantised or meta `input`.
        torch.OutOfMemoryError: past the limit, or past what the host has available.

    >>> torch_uvm.memory.empty_like(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    if not isinstance(input, torch.Tensor):
        raise TypeError(f"empty_like() takes a torch.Tensor; received {show(input)}")
    place = input.device if device is None else device
    options = {"requires_grad": requires_grad, "memory_format": memory_format}
    return _make(torch.empty_like, (input,), None, place, allocator, dtype=dtype, **options)
