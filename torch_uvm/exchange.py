"""DLPack: managed tensors given to other libraries, and managed memory taken from them.

PyTorch knows nothing of DLPack's device type 13, kDLCUDAManaged. Here `__dlpack__` of a managed tensor
gives it to who asks for it, and gives a device tensor's own bytes to who asks for the CPU's; `from_dlpack`
takes it. All else is PyTorch's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.utils.dlpack import DLDeviceType
from torch.utils.dlpack import from_dlpack as plain_from_dlpack

from torch_uvm import _C, exits
from torch_uvm.arguments import Device, accelerator, accepted_devices, exact_keywords, resolve_device, show

_CPU = int(DLDeviceType.kDLCPU)
_MANAGED = int(DLDeviceType.kDLCUDAManaged)

# PyTorch's own, before managed tensors went another way.
_plain_dlpack = torch.Tensor.__dlpack__


def _asked_type(dl_device: Any) -> int | None:
    """The device type of a (type, index) pair; None for what is none, which PyTorch refuses by itself."""
    if isinstance(dl_device, tuple) and len(dl_device) == 2 and isinstance(dl_device[0], int):
        return int(dl_device[0])
    return None


def _check_export(x: torch.Tensor, stream: Any, index: Any, copy: Any, max_version: Any) -> None:
    if max_version is not None and not (
        isinstance(max_version, tuple)
        and len(max_version) == 2
        and all(type(number) is int for number in max_version)
    ):
        raise TypeError(f"max_version is {show(max_version)}; accepted: a pair of ints, or None")
    if x.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if x.is_conj() or x.is_neg():
        raise BufferError("Can't export tensors with the conjugate or negative bit set")
    if stream is not None and type(stream) is not int:
        raise TypeError(f"stream is {show(stream)}; accepted: an int, or None")
    if copy not in (None, True, False):
        raise TypeError(f"copy is {show(copy)}; accepted: True, False, None")
    count = torch.accelerator.device_count()
    if type(index) is not int or not 0 <= index < max(count, 1):
        raise BufferError(f"dl_device has the index {show(index)}; there are {count} devices, from 0")


def _wait_for_device(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        torch.accelerator.current_stream(x.device).synchronize()


@functools.wraps(_plain_dlpack)
def _dlpack(
    self: torch.Tensor,
    *,
    stream: Any = -1,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[Any, int] | None = None,
    copy: bool | None = None,
) -> Any:
    asked = None if dl_device is None or has_torch_function_unary(self) else _asked_type(dl_device)
    if asked not in (_CPU, _MANAGED) or not _C.is_managed(self):
        given = self if copy else exits.exported(self)
        return _plain_dlpack(given, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
    assert dl_device is not None
    if asked == _CPU:
        if self.device.type == "cpu" or copy:
            return _plain_dlpack(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        _check_export(self, stream, dl_device[1], copy, max_version)
        # Who reads as the CPU cannot wait for a stream: the move waits.
        here = torch.ops.torch_uvm.move(self.detach(), torch.device("cpu"), False)
        return _plain_dlpack(here, max_version=max_version)
    _check_export(self, stream, dl_device[1], copy, max_version)
    given = self
    if copy:
        given = torch.empty_like(self, device="meta")
        given = _C.empty_strided(given.shape, given.stride(), self.dtype, self.device).copy_(self)
    if stream != -1:
        # Not for the consumer's stream only: managed memory may be read by the CPU, too.
        _wait_for_device(given)
    versioned = max_version is not None and max_version[0] >= 1
    return _C.dlpack_export(given, dl_device[1], versioned, bool(copy))


def export_managed_memory() -> None:
    """Lets `Tensor.__dlpack__` give managed memory; called by `import torch_uvm`."""
    if torch.Tensor.__dlpack__ is not _dlpack:
        torch.Tensor.__dlpack__ = _dlpack  # type: ignore[method-assign]


def _capsule_from(producer: Any, copy: bool | None) -> Any:
    """A capsule of what `producer` has; with fewer keywords for one that does not know them."""
    stream = {}
    here = accelerator()
    if here is not None and here.type == "cuda":
        stream["stream"] = torch.cuda.current_stream().cuda_stream or 1  # 1: CUDA's default stream
    unless_copied = {"copy": False} if copy is False else {}
    for known in ({"max_version": (1, 0), **unless_copied}, {"max_version": (1, 0)}):
        try:
            return producer.__dlpack__(**stream, **known)
        except TypeError:
            continue
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
        torch.accelerator.current_stream().synchronize()  # behind which the producer has put its work
    shared = _C.dlpack_import(capsule, target, copy is True)
    return shared.clone() if copy else shared


@exact_keywords
def from_dlpack(x: Any, *, device: Device | None = None, copy: bool | None = None) -> torch.Tensor:
    """A tensor on the bytes of another library's array, as torch.from_dlpack, and of managed memory, too.

    Managed memory (DLPack's device type 13, kDLCUDAManaged) becomes a tensor on the accelerator, or on the
    CPU where `device` says so: the bytes are everybody's, and neither is a copy. They live until the last
    tensor on them is gone, and are the producer's: `is_managed` is False, and they cannot be moved or
    resized. Only where a managed tensor of this library comes back is it managed, and the same bytes.

    Args:
        x: an object with `__dlpack__`, or a DLPack capsule that nobody has consumed.
        device: a torch.device, a string, the accelerator's index, or None for where the array is.
        copy: True: new memory. False: never a copy. None: a copy where that is needed.

    Raises:
        TypeError: `x` is neither; `copy` is none of the three.
        ValueError: an unknown device, or one the array's memory cannot be on without a copy.
        BufferError: what a tensor cannot be: read-only, negative strides, types and lanes that PyTorch
            lacks, another major version of DLPack, a capsule that was consumed. A capsule stays as it was.

    >>> x = torch_uvm.ones(3)
    >>> y = torch_uvm.from_dlpack(x.__dlpack__(dl_device=(13, 0)))
    >>> y.data_ptr() == x.data_ptr()
    True
    """
    if not (copy is None or copy is True or copy is False):
        raise TypeError(f"copy is {show(copy)}; accepted: True, False, None")
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
        _target(device, x.__dlpack_device__()[1])  # before the producer does anything
        return _import_managed(_capsule_from(x, copy), device, copy)
    target = None if device is None else resolve_device(device)
    return plain_from_dlpack(x, device=target, copy=copy)
