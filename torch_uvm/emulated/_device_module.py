"""The module `torch.emu`: the interface of a device module, for the emulated accelerator.

The names and meanings are those of `torch.cuda` and `torch.accelerator`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_uvm import _C

_Device = torch.device | str | int | None


def _index(device: _Device = None) -> int:
    """The index that `device` means; None and an absent index mean the current device."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        index: int | None = device
    else:
        device = torch.device(device)
        if device.type != "emu":
            raise ValueError(f"device {device}; expected one of type 'emu'")
        index = device.index
    if index is None:
        return current_device()
    if not 0 <= index < device_count():
        raise ValueError(f"emu device index {index}; there are {device_count()} (0 to {device_count() - 1})")
    return index


# --- devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(_C.in_use()) and not _is_in_bad_fork()


def __getattr__(name: str) -> Any:
    # Checkpointing saves a device's random state only if its module's `_initialized` is true.
    if name == "_initialized":
        return is_initialized()
    if name == "default_generators":
        return tuple(_generator(index) for index in range(device_count()))
    raise AttributeError(f"module 'torch.emu' has no attribute {name!r}")


def init() -> None:
    """Does nothing: the accelerator is created on first use."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(_C.emu_in_bad_fork())


def device_count() -> int:
    return int(_C.emu_device_count())


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: _Device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


class device(torch.accelerator.device_index):
    """A context in which `device` is current; None changes nothing."""

    def __init__(self, device: _Device) -> None:
        super().__init__(None if device is None else _index(device))


class device_of(device):
    """A context in which the device of `obj` is current, if that is an `emu` device."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device.index if obj.device.type == "emu" else None)


def get_device_properties(device: _Device = None) -> dict[str, Any]:
    return dict(_C.device_properties(_index(device)))


def get_device_name(device: _Device = None) -> str:
    return str(get_device_properties(device)["name"])


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """(0, 0): there is no hardware with a capability."""
    _index(device)
    return (0, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# --- streams and events


class Stream(torch.Stream):
    """A stream of an `emu` device."""

    def __new__(cls, device: _Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:  # torch builds one from stream_id, device_index, device_type
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device("emu", _index(device)), priority=priority)


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "emu"


class Event(torch.Event, metaclass=_EventType):
    """An event of an `emu` device.

    The object is a torch.Event: streams and other events accept no subclass of it.
    """

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        if interprocess:
            raise NotImplementedError(
                "interprocess=True: events of the emulated accelerator are the process's own"
            )
        return torch.Event(device="emu", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    kind = int(torch._C._autograd.DeviceType.PrivateUse1.value)
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


set_stream = torch.accelerator.set_stream


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """A context in which `stream` is its device's current stream, and its device current."""
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: _Device = None) -> None:
    """Waits for all work on all streams of a device."""
    torch.accelerator.synchronize(_index(device))


# --- random numbers


def _generator(device: _Device = None) -> torch.Generator:
    return _C.emu_default_generator(_index(device))


def manual_seed(seed: int) -> None:
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    _generator().seed()


def seed_all() -> None:
    manual_seed_all(_generator(0).seed())


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: _Device = "emu") -> torch.Tensor:
    """A CPU tensor of bytes (torch.uint8, 1-D)."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [_generator(index).get_state() for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: _Device = "emu") -> None:
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in zip(range(device_count()), new_states, strict=True):
        _generator(index).set_state(state)


# --- memory: plain and managed together, as in torch.accelerator


def _of_device(function: Callable[[int], Any]) -> Callable[..., Any]:
    """A function of torch.accelerator whose argument is a device, as in `torch.cuda`."""

    def call(device: _Device = None) -> Any:
        return function(_index(device))

    return call


memory_stats = _of_device(torch.accelerator.memory.memory_stats)
memory_allocated = _of_device(torch.accelerator.memory.memory_allocated)
max_memory_allocated = _of_device(torch.accelerator.memory.max_memory_allocated)
memory_reserved = _of_device(torch.accelerator.memory.memory_reserved)
max_memory_reserved = _of_device(torch.accelerator.memory.max_memory_reserved)
reset_peak_memory_stats = _of_device(torch.accelerator.memory.reset_peak_memory_stats)
reset_accumulated_memory_stats = _of_device(torch.accelerator.memory.reset_accumulated_memory_stats)
empty_cache = torch.accelerator.memory.empty_cache


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total) bytes of a device's memory; free counts resident managed pages as used."""
    properties = get_device_properties(device)
    return int(properties["free_memory"]), int(properties["total_memory"])
