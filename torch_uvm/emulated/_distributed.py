"""torch.distributed on the emulated accelerator: its process groups talk through gloo, as the CPU's do."""

from __future__ import annotations

from types import ModuleType
from typing import Any

GLOO = "gloo"
DEVICE = "emu"


def know_the_device(distributed: ModuleType) -> None:
    """Tells torch.distributed which backend the accelerator has.

    A group that has gloo for the accelerator gets it for the CPU, too: collectives on the accelerator are
    the CPU's (csrc/emulated/collectives.cpp), and `init_process_group()` with no backend named would make
    a group of the accelerator alone.
    """
    if not distributed.is_gloo_available():
        return
    backend: Any = distributed.Backend
    backend.default_device_backend_map.setdefault(DEVICE, GLOO)
    if DEVICE not in backend.backend_capability[GLOO]:
        backend.backend_capability[GLOO].append(DEVICE)

    config: Any = distributed.BackendConfig
    make = config.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.device_backend_map.get(DEVICE) == GLOO:
            self.device_backend_map.setdefault("cpu", self.device_backend_map[DEVICE])

    config.__init__ = __init__
