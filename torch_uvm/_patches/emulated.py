"""The emulated accelerator `emu` in parts of PyTorch that list the devices they know.

Each part of PyTorch is patched once it is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_uvm._patches.import_hooks import when_imported
from torch_uvm._patches.replace import replace_once

_DEVICE = "emu"
_GLOO = "gloo"


def watch_modules() -> None:
    """Patches the three modules below once they are imported. Imports nothing."""
    when_imported("torch._inductor.compile_fx", lambda it: replace_once(it, "compile_fx", _refusing))
    when_imported("torch.distributed.distributed_c10d", _use_gloo)
    when_imported("torch.nn.attention.flex_attention", _accept_in_flex_attention)


# --- torch.compile: Inductor has no code generator for the device


def _is_emulated(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_is_emulated(it) for it in value)
    device = value.device if isinstance(value, torch.Tensor) else value
    return isinstance(device, torch.device) and device.type == _DEVICE


def _refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compile_fx(model_: Any, example_inputs_: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        nodes = model_.graph.nodes if isinstance(model_, torch.fx.GraphModule) else ()
        made = (node.meta.get("example_value", node.meta.get("val")) for node in nodes)
        if any(map(_is_emulated, [*example_inputs_, *made])):
            raise RuntimeError(
                "inductor generates no code for the emulated accelerator 'emu'; accepted there: "
                'torch.compile(..., backend="aot_eager") or backend="eager"'
            )
        return plain(model_, example_inputs_, *args, **kwargs)

    return compile_fx


# --- torch.distributed: process groups use gloo, as the CPU's do


def _with_cpu(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.device_backend_map.get(_DEVICE) == _GLOO:
            self.device_backend_map.setdefault("cpu", self.device_backend_map[_DEVICE])

    return __init__


def _use_gloo(distributed: ModuleType) -> None:
    """Registers gloo as the device's backend.

    A process group with gloo for the device gets gloo for the CPU, too: collectives on the device run on the
    CPU (csrc/emulated/collectives.cpp), and `init_process_group()` without a backend would otherwise make a
    group of the device alone.
    """
    if not distributed.is_gloo_available():
        return
    backend: Any = distributed.Backend
    backend.default_device_backend_map.setdefault(_DEVICE, _GLOO)
    if _DEVICE not in backend.backend_capability[_GLOO]:
        backend.backend_capability[_GLOO].append(_DEVICE)
    replace_once(distributed.BackendConfig, "__init__", _with_cpu)


# --- flex_attention: not compiled, as on a CPU without a compiler


def _accepting(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def _validate_device(query: Any, *others: Any) -> None:
        if query.device.type != _DEVICE:
            plain(query, *others)

    return _validate_device


def _accept_in_flex_attention(flex_attention: ModuleType) -> None:
    """Lets the device's tensors pass the check that lists the devices which flex_attention supports.

    Without a compiler it is composed of ordinary operators, which run on any device. So does its backward,
    which the check forbids on the CPU alone.
    """
    if hasattr(flex_attention, "_validate_device"):
        replace_once(flex_attention, "_validate_device", _accepting)
