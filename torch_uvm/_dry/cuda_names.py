"""Scripts that name CUDA: in a dry run they get the emulated accelerator."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map_only

from torch_uvm._dry import meta_kernels
from torch_uvm._dry.recurrent import RECURRENT, pack, run_recurrent
from torch_uvm._patches.replace import replace_once
from torch_uvm._tools.cards import Card

_EMU = "emu"
_PACK = torch._C._VariableFunctions._pack_padded_sequence
_CUDA_TYPES = "torch.cuda."
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def translated(value: Any) -> Any:
    """Another name for a CUDA device; other values as they are."""
    if isinstance(value, torch.device):
        return torch.device(_EMU, value.index) if value.type == "cuda" else value
    if type(value) is str and (value == "cuda" or value.startswith("cuda:")):
        return _EMU + value[4:]
    if isinstance(value, _TensorType):
        return f"torch.{_EMU}.{value.__name__}"
    if type(value) is str and value.startswith(_CUDA_TYPES):
        return f"torch.{_EMU}.{value.removeprefix(_CUDA_TYPES)}"
    if isinstance(value, dict):  # torch.load's map_location
        return {name: translated(it) for name, it in value.items()}
    return value


class CudaNames(TorchFunctionMode):
    """Translates the devices among the arguments of PyTorch's functions."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:  # scripts compare its type
            return func(*args, **kwargs)
        if func is Tensor.cuda:
            return _to_emu(*args, **kwargs)
        if func == _IS_CUDA:
            return args[0].device.type == _EMU
        if "device" in kwargs:
            kwargs = {**kwargs, "device": translated(kwargs["device"])}
        if any(isinstance(it, (str, torch.device, _TensorType)) for it in args):
            args = tuple(translated(it) for it in args)
        if func in RECURRENT and args[0].device.type == _EMU:
            return run_recurrent(func.__name__, *args, **kwargs)
        if func is ctc_loss and args and args[0].device.type == _EMU:
            # In a dispatch mode it does not copy the lengths to the host, as it does on CUDA.
            args, kwargs = tree_map_only(Tensor, lambda it: it.to(_EMU), (args, kwargs))
        if func == _PACK and args[0].device.type == _EMU:
            return pack(*args, **kwargs)
        return func(*args, **kwargs)


def _place(device: Any) -> torch.device:
    """What `cuda(device)` means."""
    return torch.device(_EMU, device) if isinstance(device, int) else torch.device(translated(device or _EMU))


def _to_emu(
    tensor: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> Tensor:
    return tensor.to(_place(device), non_blocking=non_blocking, memory_format=memory_format)


def _storage_to_emu(storage: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> Any:
    return storage.to(device=_place(device))


class _TensorType(type):
    """Makes types such as `torch.cuda.FloatTensor`."""

    def __call__(cls, *args: Any) -> Tensor:
        made: Tensor = getattr(torch, cls.__name__)(*args).type(translated(cls))
        return made

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) and instance.type() == translated(cls)


class _NoRanges:
    """Profiler ranges of `torch.cuda.nvtx` that do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


_PlainGenerator = torch.Generator


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PlainGenerator)


class _Generator(_PlainGenerator, metaclass=_AnyGenerator):
    """`torch.Generator`, which no function mode sees."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _PlainGenerator(translated(device))


def answer_for_cuda(card: Card) -> None:
    """Lets `torch.cuda` answer for the emulated accelerator, as if it were the card."""
    ours: Any = torch.get_device_module(_EMU)
    index_of = ours._index
    ours._index = lambda device=None: index_of(translated(device))
    for name in dir(ours):
        if not name.startswith("_") and callable(getattr(torch.cuda, name, None)):
            setattr(torch.cuda, name, getattr(ours, name))
    cuda: Any = torch.cuda
    for name in dir(torch):
        if type(getattr(torch, name)) is type(torch.FloatTensor):
            setattr(cuda, name, _TensorType(name, (), {}))
    cuda.is_available = lambda: True
    cuda._lazy_init = lambda: None
    cuda.is_current_stream_capturing = lambda: False  # optimizers ask in each step; a driver is not there
    cuda.is_bf16_supported = lambda including_emulation=True: "bfloat16" in card.flops
    # What scripts derive from it: TF32 and bfloat16 from 8.0 on, float8 from 8.9 on.
    capability = (9, 0) if "float8" in card.flops else (8, 0) if "tf32" in card.flops else (7, 5)
    properties = types.SimpleNamespace(
        name=card.name,
        total_memory=card.memory_bytes,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=100,  # no kernel is launched by it
    )
    cuda.get_device_name = lambda device=None: card.name
    cuda.get_device_capability = lambda device=None: capability
    cuda.get_device_properties = lambda device=None: properties
    cuda.mem_get_info = lambda device=None: (card.memory_bytes, card.memory_bytes)
    cuda._get_nvml_device_index = ours._index
    cuda.nvtx._nvtx = _NoRanges()
    torch.Generator = _Generator  # type: ignore[misc]
    parallel: Any = sys.modules[torch.nn.DataParallel.__module__]
    parallel._get_available_device_type = lambda: None  # without a device it calls its module
    replace_once(torch.UntypedStorage, "cuda", lambda _: _storage_to_emu)
    replace_once(torch, "load", _on_translated)
    replace_once(torch, "set_default_tensor_type", _with_device)
    replace_once(torch.autocast, "__init__", _on_translated)
    replace_once(DeviceContext, "__init__", _on_translated)  # its mode lies below the one of this module
    meta_kernels.register()
    mode = CudaNames()
    mode.__enter__()  # type: ignore[no-untyped-call]
    replace_once(threading.Thread, "_bootstrap_inner", functools.partial(_within, mode))


def _on_translated(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*map(translated, args), **{name: translated(value) for name, value in kwargs.items()})

    return call


def _with_device(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(plain)
    def call(kind: Any) -> None:
        name = translated(kind)
        ours = isinstance(name, str) and name.startswith(f"torch.{_EMU}.")
        torch.set_default_device(_EMU if ours else "cpu")
        plain(f"torch.{name.rpartition('.')[2]}" if ours else kind)

    return call


def _within(mode: CudaNames, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return plain(*args, **kwargs)

    return call
