"""Bare CUDA calls, without torch_uvm: the driver's own time for the same work."""

from __future__ import annotations

import ctypes
import time
from functools import cache

import torch


class _Location(ctypes.Structure):
    """cudaMemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


_DEVICE = 1  # cudaMemLocationTypeDevice
_ATTACH_GLOBAL = 1  # cudaMemAttachGlobal


@cache
def _runtime() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_runtime(), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} gave the error {status}")


def seconds_to_fill(count: int) -> float:
    """Seconds to allocate `count` bytes of managed memory, prefetch them to device 0, and set them there.

    Frees the memory before it returns. Needs CUDA 13 or newer.
    """
    pointer = ctypes.c_void_p()
    to = _Location(_DEVICE, 0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    _call("cudaMallocManaged", ctypes.byref(pointer), ctypes.c_size_t(count), ctypes.c_uint(_ATTACH_GLOBAL))
    try:
        _call(
            "cudaMemPrefetchAsync", pointer, ctypes.c_size_t(count), to, ctypes.c_uint(0), ctypes.c_void_p()
        )
        _call("cudaMemsetAsync", pointer, ctypes.c_int(1), ctypes.c_size_t(count), ctypes.c_void_p())
        torch.cuda.synchronize()
        return time.perf_counter() - begin
    finally:
        _call("cudaFree", pointer)
