"""Managed tensors: which ones are, moves, which give the same bytes another device label, and copies.

A *move* is requested by name, `torch_uvm.to(x, device)` or `t.to(device, managed=True)`, and shares the
bytes. A plain `.to`, `.cpu()` or `Module.to` keeps PyTorch's meaning, a copy.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_uvm import _C
from torch_uvm._patches import install, tensor_to
from torch_uvm._patches.tensor_to import inside, inside_a_module
from torch_uvm._residency.pins import resident
from torch_uvm._switch.switch import disabled
from torch_uvm._util.arguments import Device, check_flag, exact_keywords, resolve_device, show
from torch_uvm._util.compiler import break_the_graph, is_recorded, refuse_to_record

_Movable = TypeVar("_Movable", bound=torch.Tensor | torch.nn.Module)


@exact_keywords
@break_the_graph
def is_managed(t: torch.Tensor) -> bool:
    """Whether the bytes of `t` are managed: addressable by the CPU and by every device.

    A view is managed if its base is. Tensors without bytes of their own (meta, sparse) are not.

    Args:
        t: a tensor of any shape, on any device.

    Raises:
        TypeError: `t` is not a tensor.

    >>> torch_uvm.is_managed(torch_uvm.memory.empty(4)), torch_uvm.is_managed(torch.empty(4))
    (True, False)
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"is_managed() takes a torch.Tensor; received {show(t)}")
    return _C.is_managed(t)


def _has_bytes_of_its_own(x: torch.Tensor) -> bool:
    """False for meta, sparse, nested and quantised tensors, and for wrappers around others."""
    return (
        x.layout == torch.strided
        and not x.is_nested
        and x.device.type != "meta"
        and not x.is_quantized
        and not is_traceable_wrapper_subclass(x)
    )


def _becomes_managed(device: torch.device, managed: bool | None) -> bool:
    return managed is True or (managed is None and device.type != "cpu" and _C.is_enabled())


def move_or_copy(
    x: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    managed: bool | None,
    copy: bool,
    non_blocking: bool,
    memory_format: Any,
) -> torch.Tensor:
    """What `torch_uvm.to` and `Tensor.to(managed=...)` do to one tensor, with checked arguments.

    Returns:
        a view if only the device changes and `x` is managed or adopted; `x` itself if nothing changes; else a
            copy.
    """
    dtype = x.dtype if dtype is None else dtype
    plainly = functools.partial(
        tensor_to.plain_to, x, device, dtype, non_blocking=non_blocking, memory_format=memory_format
    )
    if not _has_bytes_of_its_own(x):
        if managed:
            nested = "a nested tensor" if x.is_nested else "a tensor"
            raise ValueError(
                f"managed=True for {nested} of layout {x.layout} on {x.device} ({type(x).__name__}); "
                f"accepted: strided tensors with memory of their own"
            )
        return plainly(copy=copy)
    same_bytes = dtype == x.dtype and (
        memory_format == torch.preserve_format or x.is_contiguous(memory_format=memory_format)
    )
    is_managed = _C.is_managed(x)
    if not is_managed and not copy and same_bytes and _becomes_managed(device, managed):
        # A tensor in a file's mapping becomes managed where it is, if the devices can address it there.
        is_managed = not is_recorded(x) and torch._C._get_tracing_state() is None and _C.adopt(x, device)
    if not copy and is_recorded(x) and (managed or x.device != device or managed is False):
        refuse_to_record(f"torch_uvm.to(..., {device.type!r}, managed={managed})")
    if managed is None and not is_managed:
        return plainly(copy=copy)
    if managed is False:
        with disabled():
            return plainly(copy=copy or is_managed)
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "torch.jit.trace takes no operator with a device among its arguments, as moves and managed "
            "copies have; accepted in traced code: plain copies (managed=False, copy=True)"
        )
    install.for_managed_tensors()
    _C.start_device(device)
    if copy or not is_managed or not same_bytes:
        copied = torch.ops.torch_uvm.managed_copy(x, device, dtype, non_blocking, memory_format)
        return copied  # type: ignore[no-any-return]
    if x.device == device:
        return x
    move = _C.move_for_module if inside.module else torch.ops.torch_uvm.move
    try:
        return move(x, device, non_blocking)
    except torch.OutOfMemoryError:
        with resident(x.detach()):  # a pin waits for operators of other threads that have the room
            return move(x, device, non_blocking)


def _fits(memory_format: torch.memory_format, x: torch.Tensor) -> bool:
    """Whether Module.to converts `x` to the format: channels-last formats need as many dimensions."""
    dimensions = {torch.channels_last: 4, torch.channels_last_3d: 5}
    return x.dim() == dimensions.get(memory_format, x.dim())


@exact_keywords
@break_the_graph
def to(
    tensor_or_module: _Movable,
    device: Device | None,
    dtype: torch.dtype | None = None,
    *,
    managed: bool | None = None,
    copy: bool = False,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> _Movable:
    """Moves a tensor, or every parameter and buffer of a module, to `device`.

    For a managed tensor of which only the device changes, the result is a view labelled with `device`: same
    address, sizes, strides and offset, one version counter; the tensor stays usable. To autograd it is a
    view whose backward moves the gradient back; writing to it in place raises if the tensor requires grad.
    In every other case the result is a copy. One exception: where every device addresses the host's pageable
    memory, a CPU tensor in a private mapping of a file (torch.load(mmap=True), safetensors) becomes managed
    where it is, and moves (docs/hardware.md).

    A module keeps the identity of its parameters, their ties, hooks and places in optimizers; gradients move
    along. `dtype` applies to its floating-point and complex tensors only, and the channels-last formats to
    those with as many dimensions. Its moved tensors are not views.

    Args:
        tensor_or_module: a tensor of any shape, or a module (changed in place and returned).
        device: a torch.device, a string, the accelerator's index, or None for the device it is on.
        dtype: None keeps it.
        managed: True: managed memory, by a copy if it is not managed yet. False: ordinary memory, by a copy
            if it is managed. None: a managed tensor stays managed; for other tensors the switch decides.
        copy: always make new memory.
        non_blocking: a move to the CPU does not wait for the device's pending work; the caller must. For
            copies, as in torch.Tensor.to.
        memory_format: as in torch.Tensor.to.

    Raises:
        TypeError: neither a tensor nor a module; a flag that is not a bool (or None for `managed`); for a
            module, a dtype that is neither floating-point nor complex.
        ValueError: an unknown device; managed=True for a meta, sparse, nested, quantised or wrapping tensor.
        torch.OutOfMemoryError: there is no memory for a copy.

    >>> x = torch_uvm.memory.ones(3)
    >>> torch_uvm.to(x, "cpu").data_ptr() == x.data_ptr()
    True
    """
    check_flag("managed", managed, (True, False, None))
    check_flag("copy", copy, (True, False))
    check_flag("non_blocking", non_blocking, (True, False))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {show(dtype)}; accepted: a torch.dtype, or None")
    if not isinstance(memory_format, torch.memory_format):
        raise TypeError(f"memory_format is {show(memory_format)}; accepted: a torch.memory_format")
    target = None if device is None else resolve_device(device)
    if isinstance(tensor_or_module, torch.nn.Module):
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(
                f"dtype is {dtype} for a module; accepted: floating-point and complex dtypes, or None"
            )

        def convert(t: torch.Tensor) -> torch.Tensor:
            wanted = dtype if t.is_floating_point() or t.is_complex() else None
            where = t.device if target is None else target
            form = memory_format if _fits(memory_format, t) else torch.preserve_format
            return move_or_copy(t, where, wanted, managed, copy, non_blocking, form)

        with inside_a_module():
            return tensor_or_module._apply(convert)  # type: ignore[no-any-return, no-untyped-call]
    if not isinstance(tensor_or_module, torch.Tensor):
        raise TypeError(f"to() takes a torch.Tensor or a torch.nn.Module; received {show(tensor_or_module)}")
    where = tensor_or_module.device if target is None else target
    moved = move_or_copy(tensor_or_module, where, dtype, managed, copy, non_blocking, memory_format)
    return moved  # type: ignore[return-value]
