"""Factories of tensors that are managed whether the switch is on or off.

The functions have the signatures of their namesakes in torch: sizes as varargs or as one sequence, the same
keywords. `device` differs: None means the current accelerator, and "cpu" makes a managed CPU tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._allocators.allocator import Allocator, made_by
from torch_uvm._patches import install
from torch_uvm._util.arguments import (
    Device,
    accelerator,
    accepted_devices,
    exact_keywords,
    resolve_device,
    show,
)

#: The largest tensor, so that strides in bytes fit 64 bits.
_MAX_TENSOR_BYTES = 2**63 - 1


def _sizes(args: tuple[Any, ...], size: Any, what: str) -> tuple[int, ...]:
    accepted = "accepted: ints of at least 0, or one sequence of them (() for 0 dimensions)"
    if (not args) == (size is None):
        problem = "needs a size" if size is None else f"has two sizes, {show(args)} and {show(size)}"
        raise TypeError(f"{what}() {problem}; {accepted}")
    given: Any = args or (size,)
    if len(given) == 1 and isinstance(given[0], (Sequence, torch.Size)):
        given = given[0]
    if isinstance(given, str):
        raise TypeError(f"{what}() size is {show(given)}; {accepted}")
    sizes = []
    for item in given:
        try:
            if isinstance(item, bool):
                raise TypeError
            sizes.append(operator.index(item))
        except TypeError:
            raise TypeError(f"{what}() size has {show(item)}; {accepted}") from None
    for number in sizes:
        if number < 0:
            raise ValueError(f"{what}() size {tuple(sizes)} has {number}; {accepted}")
    return tuple(sizes)


def _device(device: Device | None, what: str) -> torch.device:
    if device is not None:
        return resolve_device(device)
    here = accelerator()
    if here is None:
        raise ValueError(f"{what}(): device is None and there is no accelerator; accepted: 'cpu'")
    return resolve_device(here)


def _check_dtype(dtype: object, what: str) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{what}() dtype is {show(dtype)}; accepted: a torch.dtype, or None for the default")
    if str(dtype).startswith("torch.q"):
        raise ValueError(f"{what}() dtype is {dtype}; accepted: dtypes that are not quantised")
    return dtype


def _check_options(
    layout: object, pin_memory: object, requires_grad: object, dtype: torch.dtype, what: str
) -> None:
    if layout is not None and layout is not torch.strided:
        raise ValueError(f"{what}() layout is {show(layout)}; accepted: torch.strided")
    if pin_memory:
        raise ValueError(
            f"{what}() pin_memory is {show(pin_memory)}; accepted: False (managed memory needs no pinning)"
        )
    if not isinstance(requires_grad, bool):
        raise TypeError(f"{what}() requires_grad is {show(requires_grad)}; accepted: True, False")
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"{what}() requires_grad is True for dtype {dtype}; accepted: floating point and complex dtypes"
        )


def _make(like: torch.Tensor, device: torch.device, allocator: object, what: str) -> torch.Tensor:
    """A managed tensor with the sizes, strides and dtype of `like`, a meta tensor."""
    install.for_managed_tensors()
    with made_by(allocator, device, what) or nullcontext():
        return _C.empty_strided(list(like.size()), list(like.stride()), like.dtype, device)


def _meta(sizes: tuple[int, ...], dtype: torch.dtype, memory_format: object, what: str) -> torch.Tensor:
    """A meta tensor of that shape, whose strides follow torch's own rules."""
    elements = 1
    for size in sizes:
        elements *= max(size, 1)
    if elements * dtype.itemsize > _MAX_TENSOR_BYTES:
        raise ValueError(
            f"{what}() size {sizes} of {dtype} is past {_MAX_TENSOR_BYTES} bytes, the most accepted"
        )
    dims = {torch.channels_last: 4, torch.channels_last_3d: 5}
    if memory_format is not torch.contiguous_format and memory_format not in dims:
        raise ValueError(
            f"{what}() memory_format is {show(memory_format)}; accepted: torch.contiguous_format, "
            "torch.channels_last, torch.channels_last_3d"
        )
    needed = dims.get(memory_format, len(sizes))
    if len(sizes) != needed:
        raise ValueError(
            f"{what}() memory_format {memory_format} for {len(sizes)} dimensions; accepted: {needed} of them"
        )
    return torch.empty(sizes, dtype=dtype, device="meta", memory_format=memory_format)


def _new(
    args: tuple[Any, ...],
    size: Any,
    what: str,
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: Device | None,
    requires_grad: bool,
    pin_memory: bool,
    allocator: Allocator | None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    kind = _check_dtype(dtype, what)
    sizes = _sizes(args, size, what)
    _check_options(layout, pin_memory, requires_grad, kind, what)
    meta = _meta(sizes, kind, memory_format, what)
    return _make(meta, _device(device, what), allocator, what)


@exact_keywords
def empty(
    *sizes: Any,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = torch.strided,
    device: Device | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    allocator: Allocator | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """A managed tensor of that size, with uninitialised values.

    Args:
        sizes, size: ints, or one sequence of them; `()` for 0 dimensions. 0 is a valid size.
        dtype: None for torch's default.
        layout, pin_memory: accepted for calls that pass them; only torch.strided and False are valid.
        device: None for the current accelerator; a device, a string or the accelerator's index; "cpu" for a
            managed CPU tensor.
        requires_grad: as in torch.empty.
        allocator: where the memory comes from; None for the allocator of the enclosing `use_allocator`, else
            the process's own.
        memory_format: torch.contiguous_format, torch.channels_last or torch.channels_last_3d.

    Raises:
        TypeError, ValueError: a value that is not accepted (sizes below 0, a meta device, pin_memory=True, a
            layout that is not strided, a device that the allocator does not serve). Nothing has changed.
        torch.OutOfMemoryError: beyond the limit, or beyond what the host has available.

    >>> torch_uvm.memory.empty(2, 3, device="cpu").shape
    torch.Size([2, 3])
    """
    made = _new(
        sizes, size, "empty", dtype, layout, device, requires_grad, pin_memory, allocator, memory_format
    )
    return made.requires_grad_(requires_grad)


@exact_keywords
def zeros(
    *sizes: Any,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = torch.strided,
    device: Device | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    allocator: Allocator | None = None,
) -> torch.Tensor:
    """A managed tensor of zeros; arguments and errors as those of `empty`.

    >>> torch_uvm.memory.zeros(2, device="cpu")
    tensor([0., 0.])
    """
    made = _new(sizes, size, "zeros", dtype, layout, device, requires_grad, pin_memory, allocator)
    return made.zero_().requires_grad_(requires_grad)


@exact_keywords
def ones(
    *sizes: Any,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = torch.strided,
    device: Device | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    allocator: Allocator | None = None,
) -> torch.Tensor:
    """A managed tensor of ones; arguments and errors as those of `empty`.

    >>> torch_uvm.memory.ones(2, device="cpu")
    tensor([1., 1.])
    """
    made = _new(sizes, size, "ones", dtype, layout, device, requires_grad, pin_memory, allocator)
    return made.fill_(1).requires_grad_(requires_grad)


@exact_keywords
def full(
    size: Sequence[int],
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = torch.strided,
    device: Device | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
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
    if not isinstance(size, (Sequence, torch.Size)):
        raise TypeError(f"full() size is {show(size)}; accepted: a sequence of ints of at least 0")
    if not isinstance(fill_value, (bool, int, float, complex)):
        raise TypeError(f"full() fill_value is {show(fill_value)}; accepted: a bool, int, float or complex")
    kind = None if dtype is None else _check_dtype(dtype, "full")
    try:
        value = torch.full((), fill_value, dtype=kind, device="cpu")
    except (RuntimeError, OverflowError) as error:
        accepted = f"values that {kind} holds" if kind else "values that torch.full takes"
        raise ValueError(f"full() fill_value is {show(fill_value)}: {error}; accepted: {accepted}") from None
    made = _new((), size, "full", value.dtype, layout, device, requires_grad, pin_memory, allocator)
    return made.fill_(fill_value).requires_grad_(requires_grad)


@exact_keywords
def empty_like(
    input: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Device | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    allocator: Allocator | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """A managed tensor of the size of `input`; its values are whatever was in the memory.

    Args:
        input: a strided tensor, managed or not.
        dtype, device: None for those of `input`.
        memory_format: torch.preserve_format keeps the strides of dense tensors, as torch.empty_like.
        layout, requires_grad, pin_memory, allocator: as those of `empty`.

    Raises:
        TypeError, ValueError: as `empty`; also for a sparse, quantised or meta `input`.
        torch.OutOfMemoryError: past the limit, or past what the host has available.

    >>> torch_uvm.memory.empty_like(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    what = "empty_like"
    if not isinstance(input, torch.Tensor):
        raise TypeError(f"{what}() takes a torch.Tensor; received {show(input)}")
    if input.layout is not torch.strided or input.is_quantized:
        found = "quantised" if input.is_quantized else str(input.layout)
        raise ValueError(f"{what}() input is {found}; accepted: ordinary strided tensors")
    if device is None and input.device.type not in ("cpu", getattr(accelerator(), "type", "cpu")):
        raise ValueError(f"{what}() input is on {input.device}; accepted: {accepted_devices()}")
    kind = _check_dtype(input.dtype if dtype is None else dtype, what)
    _check_options(layout, pin_memory, requires_grad, kind, what)
    if memory_format is torch.preserve_format:
        shadow = torch.empty_strided(input.size(), input.stride(), dtype=kind, device="meta")
        meta = torch.empty_like(shadow, memory_format=torch.preserve_format)
    else:
        meta = _meta(tuple(input.size()), kind, memory_format, what)
    place = resolve_device(input.device if device is None else device)
    return _make(meta, place, allocator, what).requires_grad_(requires_grad)
