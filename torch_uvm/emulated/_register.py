"""Registers the emulated accelerator as PyTorch's device `emu`."""

from __future__ import annotations

import atexit
import threading

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from torch_uvm import _C

_lock = threading.Lock()


def register() -> None:
    """Registers the device `emu` and the module `torch.emu`. Calling it again does nothing.

    PyTorch has one slot for an external device, and makes the device in it the current accelerator even
    beside CUDA. So this is called only on request, or where there is no GPU.

    Raises:
        RuntimeError: another extension uses the slot.
    """
    with _lock:
        if _C.emu_is_registered():
            return
        taken = torch._C._get_privateuse1_backend_name()
        if taken not in ("privateuseone", "emu"):
            raise RuntimeError(
                f"the emulated accelerator cannot be registered as 'emu': "
                f"another extension has registered {taken!r} as this process's external device"
            )
        rename_privateuse1_backend("emu")
        _C.emu_register()
        atexit.register(_C.emu_finish_backward_threads)

        from torch_uvm._patches.emulated import watch_modules
        from torch_uvm._patches.multiprocessing import send_copies
        from torch_uvm.emulated import _device_module

        torch._register_device_module("emu", _device_module)
        generate_methods_for_privateuse1_backend(
            for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
        )
        send_copies()  # the device's memory has no handle that another process could open
        watch_modules()
