"""`torch_uvm.memory.from_dlpack`: tensors on the memory of other libraries, managed memory included."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.utils.dlpack import DLDeviceType
from torch.utils.dlpack import from_dlpack as plain_from_dlpack

from torch_uvm import _C
from torch_uvm._util.arguments import (
    Device,
    accelerator,
    accepted_devices,
    check_flag,
    exact_keywords,
    resolve_device,
    show,
)

_MANAGED = int(DLDeviceType.kDLCUDAManaged)


def _capsule_from(producer: Any, copy: bool | None) -> Any:
    """A capsule from `producer`, called with fewer keywords if it does not know them."""
    stream = {}
    here = accelerator()
    if here is not None and here.type == "cuda":
        stream["stream"] = torch.cuda.current_stream().cuda_stream or 1  # 1: CUDA's default stream
    unless_copied = {"copy": False} if copy is False else {}
    for known in ({"max_version": (1, 0), **unless_copied}, {"max_version": (1, 0)}):
        with contextlib.suppress(TypeError):
            return producer.__dlpack__(**stream, **known)
    return producer.__dlpack__(**stream)


def _target(device: Device | None, index: int) -> torch.device:
    here = accelerator()
    if device is not None:
        return resolve_device(device)
    if here is None or not 0 <= index < torch.accelerator.device_count():
        raise ValueError(
            f"a DLPack tensor of managed memory on the device with the index {index}; "
            f"accepted: {accepted_devices()}, which `device` chooses"
        )
    return torch.device(here.type, index)


def _import_managed(capsule: Any, device: Device | None, copy: bool | None) -> torch.Tensor:
    target = _target(device, _C.dlpack_device(capsule)[1])
    if target.type == "cpu" and accelerator() is not None:
        torch.accelerator.current_stream().synchronize()  # the producer's work is before it in this stream
    shared = _C.dlpack_import(capsule, target, copy is True)
    return shared.clone() if copy else shared


@exact_keywords
def from_dlpack(x: Any, *, device: Device | None = None, copy: bool | None = None) -> torch.Tensor:
    """A tensor on the memory of another library's array, like torch.from_dlpack, managed memory included.

    Managed memory (DLPack's device type 13, kDLCUDAManaged) becomes a tensor on the accelerator, or on the
    CPU with `device="cpu"`; both share the bytes. The bytes live until the last tensor on them is freed, and
    belong to the producer: `is_managed` is False, and they cannot be moved or resized. If the producer is a
    managed tensor of this library, the result is managed, on the same bytes.

    Args:
        x: an object with `__dlpack__`, or a DLPack capsule that has not been consumed.
        device: a torch.device, a string, the accelerator's index, or None for the array's device.
        copy: True: new memory. False: never a copy. None: a copy if necessary.

    Raises:
        TypeError: `x` is neither; `copy` is none of the three.
        ValueError: an unknown device, or one that the array's memory cannot be on without a copy.
        BufferError: an array that a tensor cannot represent: read-only, negative strides, types and lanes
            that PyTorch lacks, another major version of DLPack; a consumed capsule. The capsule is
            unchanged.

    >>> x = torch_uvm.memory.ones(3)
    >>> y = torch_uvm.memory.from_dlpack(x.__dlpack__(dl_device=(13, 0)))
    >>> y.data_ptr() == x.data_ptr()
    True
    """
    check_flag("copy", copy, (True, False, None))
    is_capsule = type(x).__name__ == "PyCapsule"
    if not is_capsule and not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        raise TypeError(
            f"from_dlpack() takes an array with __dlpack__, or a DLPack capsule; received {show(x)}"
        )
    if is_capsule:
        if _C.dlpack_device(x)[0] == _MANAGED:
            return _import_managed(x, device, copy)
        if device is not None or copy is not None:
            raise ValueError("device and copy with a capsule that is not of managed memory; accepted: None")
        return plain_from_dlpack(x)
    if isinstance(x, torch.Tensor) and not has_torch_function_unary(x) and _C.is_managed(x):
        capsule = x.__dlpack__(stream=None, max_version=(1, 0), dl_device=(DLDeviceType.kDLCUDAManaged, 0))
        return _import_managed(capsule, x.device if device is None else device, copy)
    if x.__dlpack_device__()[0] == _MANAGED:
        _target(device, x.__dlpack_device__()[1])  # checked before the producer is called
        return _import_managed(_capsule_from(x, copy), device, copy)
    target = None if device is None else resolve_device(device)
    return plain_from_dlpack(x, device=target, copy=copy)
