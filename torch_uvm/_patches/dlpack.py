"""`Tensor.__dlpack__`: managed tensors given to other libraries.

PyTorch does not know DLPack's device type 13, kDLCUDAManaged. With this patch a managed tensor is exported
as kDLCUDAManaged to a consumer that asks for it, and a managed tensor on a device is exported to the CPU
without a copy. Every other export is PyTorch's. The other direction is `torch_uvm.memory.from_dlpack`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.utils.dlpack import DLDeviceType

from torch_uvm import _C
from torch_uvm._patches import pointer_escapes
from torch_uvm._patches.replace import replace_once
from torch_uvm._util.arguments import check_flag, show

_CPU = int(DLDeviceType.kDLCPU)
_MANAGED = int(DLDeviceType.kDLCUDAManaged)


def _asked_type(dl_device: Any) -> int | None:
    """The device type of a (type, index) pair; None if it is not one, which PyTorch's method refuses."""
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
    check_flag("copy", copy, (True, False, None))
    count = torch.accelerator.device_count()
    if type(index) is not int or not 0 <= index < max(count, 1):
        raise BufferError(f"dl_device has the index {show(index)}; there are {count} devices, from 0")


def _exporting_managed(plain: Callable[..., Any]) -> Any:
    @functools.wraps(plain)
    def export(
        self: torch.Tensor,
        *,
        stream: Any = -1,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
        read_only: bool = False,
    ) -> Any:
        asks: dict[str, Any] = {"max_version": max_version}
        if read_only:
            asks["read_only"] = True  # PyTorch has it since 2.14
        asked = None if dl_device is None or has_torch_function_unary(self) else _asked_type(dl_device)
        if dl_device is None or asked not in (_CPU, _MANAGED) or not _C.is_managed(self):
            given = self if copy else pointer_escapes.exported(self)
            return plain(given, stream=stream, dl_device=dl_device, copy=copy, **asks)
        if asked == _CPU and (self.device.type == "cpu" or copy):
            return plain(self, stream=stream, dl_device=dl_device, copy=copy, **asks)
        _check_export(self, stream, dl_device[1], copy, max_version)
        if asked == _CPU:
            # A consumer on the CPU cannot wait for a stream, so the move waits.
            here = torch.ops.torch_uvm.move(self.detach(), torch.device("cpu"), False)
            return plain(here, **asks)
        if read_only:
            raise BufferError("Can't export managed memory as read-only; dl_device=(kDLCPU, 0) can be")
        return _export_managed(self, stream, max_version, dl_device[1], copy)

    return export


def _export_managed(x: torch.Tensor, stream: Any, max_version: Any, index: int, copy: bool | None) -> Any:
    given = x
    if copy:
        given = torch.empty_like(x, device="meta")
        given = _C.empty_strided(given.shape, given.stride(), x.dtype, x.device).copy_(x)
    versioned = max_version is not None and max_version[0] >= 1
    capsule = _C.dlpack_export(given, index, versioned, bool(copy))  # may fetch the bytes
    if stream != -1 and given.device.type != "cpu":
        # Waiting on the consumer's stream is not enough: the CPU may read managed memory, too.
        torch.accelerator.current_stream(given.device).synchronize()
    return capsule


def export_managed_memory() -> None:
    """Replaces `Tensor.__dlpack__`. Calling it again does nothing."""
    replace_once(torch.Tensor, "__dlpack__", _exporting_managed)
