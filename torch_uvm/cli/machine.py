"""What `info` measures of the machine beside the library: the driver, and the speed of the link."""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_uvm
from torch_uvm import _C

_NVIDIA = Path("/proc/driver/nvidia/version")
_VARIABLES = (
    "TORCH_UVM",
    "PYTORCH_ENABLE_UNIFIED_MEMORY",
    "TORCH_UVM_DEVICE",
    "TORCH_UVM_CONF",
    "TORCH_UVM_REPORT",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)

LINK_BYTES = 64 << 20  # at most, in each of two buffers: plain memory on the device, pinned on the host
_SECONDS = 0.3  # for each direction, without the allocation of the buffers


def environment() -> dict[str, str]:
    """The variables of torch_uvm that are set."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def driver() -> dict[str, Any]:
    """The NVIDIA driver.

    Returns:
        ``nvidia``: the kernel driver's version, such as "580.65.06". ``cuda``: the latest CUDA that it
            supports, such as "13.0". None if unknown.
    """
    nvidia = None
    if _NVIDIA.exists():
        found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", _NVIDIA.read_text(errors="replace"))
        nvidia = None if found is None else found[1]
    ask: Callable[[], int] | None = getattr(torch._C, "_cuda_getDriverVersion", None)
    version = 0 if ask is None else ask()
    return {"nvidia": nvidia, "cuda": f"{version // 1000}.{version % 1000 // 10}" if version else None}


def starts_with_torch() -> bool:
    """Whether `import torch` looks at TORCH_UVM: the package is installed with its entry point."""
    found = importlib.metadata.entry_points(group="torch.backends")
    return any(it.value.startswith("torch_uvm_autoload") for it in found) and (
        os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    )


def _rate(count_of_bytes: int, copy: Callable[[], object], clock: Callable[[], float]) -> float:
    """GB/s (10^9 bytes) of copies in a row, by a clock in seconds."""
    copy()
    torch.accelerator.synchronize()
    began, count, until = clock(), 0, time.monotonic() + _SECONDS
    while count == 0 or (count < 16 and time.monotonic() < until):
        copy()
        torch.accelerator.synchronize()  # so that a slow link is not given more than the time allows
        count += 1
    return round(count_of_bytes * count / max(clock() - began, 1e-9) / 1e9, 2)


def link() -> dict[str, Any]:
    """Measures copies of ordinary pinned memory between the host and the current device.

    It takes less than a second and at most 128 MiB of memory, none of it managed.

    Returns:
        ``device``; ``bytes`` of one copy; ``to_device`` and ``to_host`` in GB/s (10^9 bytes per second);
        ``modelled``: measured by the emulated accelerator's clock, so not about this machine.

    Raises:
        RuntimeError: there is no accelerator to measure copies on, or no memory for it.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type not in ("cuda", "emu"):
        raise RuntimeError("there is no accelerator that copies can be measured on")
    index = torch.accelerator.current_device_index()
    free = torch.accelerator.get_memory_info(index)[0]
    count = min(LINK_BYTES, free // 4)
    with torch_uvm.disabled():
        device = torch.empty(count, dtype=torch.uint8, device=torch.device(here.type, index))
        host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    clock = (lambda: _C.emu_time_us() / 1e6) if here.type == "emu" else time.perf_counter
    return {
        "device": str(device.device),
        "bytes": count,
        "to_device": _rate(count, lambda: device.copy_(host, non_blocking=True), clock),
        "to_host": _rate(count, lambda: host.copy_(device, non_blocking=True), clock),
        "modelled": here.type == "emu",
    }
