"""Queries of memory by the CUDA runtime itself, without torch_uvm."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

MIB = 1024**2
CPU_ID, NO_ID = -1, -2  # cudaCpuDeviceId, cudaInvalidDeviceId
READ_MOSTLY, PREFERRED, ACCESSED_BY, LAST_PREFETCH = 1, 2, 3, 4  # cudaMemRangeAttribute...
NATIVE, MANAGED = 2, 3  # cudaMemoryType...


@cache
def runtime() -> Any:
    """The CUDA runtime that this process has loaded, or the fake runtime."""
    everything = ctypes.CDLL(None)
    if hasattr(everything, "cudaPointerGetAttributes"):
        return everything
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if re.search(r"/libcudart[^/]*\.so", path):
            return ctypes.CDLL(path)
    raise LookupError("no CUDA runtime is loaded")


def copy(target: int, source: int, count: int, stream: int | None = None) -> None:
    """Copies by CUDA itself, without an operator. Synchronous without a stream."""
    default = 4  # cudaMemcpyDefault
    arguments = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(count), default
    if stream is None:
        status = runtime().cudaMemcpy(*arguments)
    else:
        status = runtime().cudaMemcpyAsync(*arguments, ctypes.c_void_p(stream))
    assert status == 0, status


def memory_kind(address: int) -> int:
    """cudaMemoryType: 0 unregistered, 1 host, 2 device, 3 managed."""
    attributes = (ctypes.c_int * 64)()  # larger than any version's cudaPointerAttributes; `type` comes first
    assert runtime().cudaPointerGetAttributes(ctypes.byref(attributes), ctypes.c_void_p(address)) == 0
    return int(attributes[0])


def is_managed_by_cuda(t: torch.Tensor) -> bool:
    return memory_kind(t.data_ptr()) == MANAGED


def range_attribute(t: torch.Tensor, which: int, count: int = 1) -> list[int]:
    """An attribute of a contiguous tensor's whole range."""
    found = (ctypes.c_int * count)()
    size = ctypes.sizeof(found)
    status = runtime().cudaMemRangeGetAttribute(
        ctypes.byref(found),
        ctypes.c_size_t(size),
        which,
        ctypes.c_void_p(t.data_ptr()),
        ctypes.c_size_t(t.nbytes),
    )
    assert status == 0, status
    return list(found)


def busy(milliseconds: float = 50) -> None:
    """Keeps the current stream busy for about `seconds` (at 2 GHz), so that later work on it is pending."""
    torch.cuda._sleep(int(milliseconds * 2e6))


def is_pending() -> bool:
    return not torch.cuda.current_stream().query()
