"""Scripts that ask NVML, by the package pynvml: in a dry run there is no driver."""

from __future__ import annotations

import types
from typing import Any

import torch

from torch_uvm._tools.cards import Card


def answer_for_nvml(nvml: Any, card: Card) -> None:
    """Lets the module say what the card is and has free. Measurements are not supported, as on some cards."""

    def memory_info(device: object, version: object = None) -> types.SimpleNamespace:
        free, total = torch.cuda.mem_get_info()
        return types.SimpleNamespace(total=total, free=free, used=total - free, reserved=0, version=version)

    def not_supported(name: str) -> None:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    nvml._nvmlGetFunctionPointer = not_supported  # all other functions call it
    nvml.nvmlInit = nvml.nvmlInitWithFlags = nvml.nvmlShutdown = lambda *flags: None
    nvml.nvmlDeviceGetCount = torch.cuda.device_count
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetHandleByUUID = nvml.nvmlDeviceGetHandleByPciBusId = lambda name: 0
    nvml.nvmlDeviceGetName = lambda device: card.name
    nvml.nvmlDeviceGetMemoryInfo = memory_info
