"""Whether this machine has managed memory, and when our allocator takes its place in PyTorch's CUDA.

Importing torch_uvm does not initialise CUDA. The allocator is installed when CUDA is initialised, or at once
if it already is, and stays installed: with the switch off it delegates every call to the allocator that was
there before.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from torch_uvm import _C

#: Prints the number of GPUs, of those that the environment makes visible.
_COUNT = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""


def has_gpu() -> bool:
    """Whether there is a GPU. Does not initialise CUDA, so that the process can still fork."""
    by_nvml = getattr(torch.cuda, "_device_count_nvml", lambda: 0)
    if torch.version.cuda is None or torch.cuda.is_initialized() or by_nvml() >= 0:
        return torch.cuda.device_count() > 0
    # There is no NVML, or only a part of a GPU (MIG): PyTorch would ask CUDA. Another process does.
    child = subprocess.run([sys.executable, "-ISc", _COUNT], capture_output=True, check=False)
    if child.returncode != 0:  # there is no driver that could be initialised
        return torch.cuda.device_count() > 0
    return int(child.stdout) > 0


@functools.cache
def expect_cuda() -> None:
    """Installs the allocator: now, or when CUDA is initialised. Calling it again does nothing."""
    torch.cuda._lazy_call(_C.cuda_install)


def check_runtime(what: str, now: bool = False) -> None:
    """Checks that there is managed memory here, and makes the accelerator ask the switch from now on.

    Args:
        what: the call that needs it, for the message.
        now: also initialise the accelerator.

    Raises:
        RuntimeError: there is no runtime for this machine's accelerator.
    """
    backend = _C.backend()
    if backend == "none":
        why = "" if _C.built_with_cuda() else " (torch_uvm was built without CUDA)"
        raise RuntimeError(
            f"{what}: there is no managed memory for this machine's accelerator{why}; "
            "set TORCH_UVM_DEVICE=emu to use the emulated one"
        )
    if backend == "cuda":
        if now:
            torch.cuda.init()
        expect_cuda()


def known_bytes(count: int) -> int | None:
    """Available bytes as the extension counts them; None if the host does not say."""
    return None if count == 2**64 - 1 else count
