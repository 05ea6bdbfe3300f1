"""The mode under which a script runs dry: operators on large tensors allocate, and are not run."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_uvm._dry import unknown_shapes
from torch_uvm._dry.costs import device_us, work_of
from torch_uvm._dry.host_memory import reserved
from torch_uvm._dry.results import New, NoResult, OperatorInfo, Result, Results, made, new_bytes, tensors_of
from torch_uvm._dry.timeline import Timeline
from torch_uvm._dry.values import (
    LARGE_ON_HOST,
    SMALL,
    StandIns,
    is_computed,
    is_virtual,
    mark_nominal,
    nominal,
)
from torch_uvm._tools.cards import Card

_MATH, _FLASH = 0, 1  # of torch.nn.attention.SDPBackend
#: They allocate, and write nothing.
_ALLOCATE = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream"}
)
#: Collectives: those of the group of `ranks.py` return at once.
_NOT_OURS = frozenset({"c10d", "_c10d_functional"})
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
#: They say whether gradients are finite; in a dry run they always are.
_FINITE = frozenset({"aten::_amp_foreach_non_finite_check_and_unscale_"})


class DryMode(TorchDispatchMode):
    """Replaces operators. Applies to the thread that enters it, and to its backward passes.

    Args:
        card: whose times `timeline` gets.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.card = card
        self.timeline = Timeline()
        self.stand_ins = StandIns()
        self._results = Results()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # it asks for shapes, as DTensor does; nothing is allocated
        if any(it not in _KNOWN_TYPES for it in types):
            return NotImplemented  # a wrapper: it calls operators on what it wraps
        info = self._results.info(func)
        if info.is_view:
            self.timeline.view()
            return func(*args, **kwargs)
        tensors = list(tensors_of(args, kwargs))
        if func.namespace in _NOT_OURS or any(it.layout != torch.strided for it in tensors):
            return func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if (
            name == "aten::_fused_sdp_choice"
        ):  # of the accelerator, which asks with the CPU's views of its tensors
            query, value = args[0], args[2]
            return _FLASH if query.dim() == value.dim() == 4 and query.size(3) == value.size(3) else _MATH
        device = _device_of(func, info, tensors, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        virtual = any(is_virtual(it) for it in tensors)
        if device.type == "cpu" and not virtual and tensors and all(it.is_cpu for it in tensors):
            return self._as_it_is(func, info, tensors, args, kwargs)
        if not info.returns_tensors and not info.returns_arguments:
            return self._value(func, name, tensors, args, kwargs, virtual)
        if name in _ALLOCATE:
            return self._allocated(func, args, kwargs, device)
        if name == "aten::_pin_memory":
            return tensors[0] if virtual else func(*args, **kwargs)
        began = time.monotonic_ns()
        returned = self._returned(func, info, name, tensors, args, kwargs, virtual, device)
        if device.type != "cpu" or any(not it.is_cpu for it in tensors):
            written = info.written_values(args, kwargs)
            work = work_of(func, args, kwargs, returned, written)
            to_host = device.type == "cpu"
            us = device_us(work, self.card)
            if name in _COPIES and (to_host or any(it.is_cpu for it in tensors)):
                link = self.card.out if to_host else self.card.into
                us = work.bytes / 2 / link * 1e6 + self.card.launch_us
            listed = len(args[0]) if args and isinstance(args[0], (list, tuple)) else 0
            self.timeline.kernel(
                us,
                waits=to_host,
                began_ns=began,
                is_convolution="convolution" in work.kind,
                listed=listed,
            )
            if to_host and not all(map(is_computed, tensors)):
                self.stand_ins.note("copy to the host", "no values")
        return returned

    def _returned(
        self,
        func: torch._ops.OpOverload,
        info: OperatorInfo,
        name: str,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        virtual: bool,
        device: torch.device,
    ) -> Any:
        if info.returns_arguments and not info.writes_out:
            if not virtual:
                return self._as_it_is(func, info, tensors, args, kwargs)
            if name in _FINITE:
                self.stand_ins.note("gradients that overflow", "none")
            else:
                for it in info.written_values(args, kwargs):
                    mark_nominal(it)
            returned = [info.argument(at, args, kwargs) for at in info.returned if at is not None]
            return tuple(returned) if len(returned) > 1 else returned[0] if returned else None
        result: Result = unknown_shapes.result_of(func, name, args, kwargs)
        if result is not None:
            if not virtual:
                return self._as_it_is(func, info, tensors, args, kwargs)
            self.stand_ins.note(name.removeprefix("aten::").strip("_"), unknown_shapes.TAKEN[name])
        else:
            result = self._results.of(func, args, kwargs)
            most = SMALL if device.type != "cpu" else LARGE_ON_HOST
            if not virtual and new_bytes(result) <= most:
                return self._as_it_is(func, info, tensors, args, kwargs)
        if info.writes_out:
            _resize_outputs(func, info, result, args, kwargs)
        numbers = iter(range(1 << 30))
        is_nominal = not all(map(is_computed, tensors))

        def make(new: New) -> Tensor:
            number = next(numbers)
            if device.type == "cpu" and new.bytes > SMALL:
                return reserved(new.size, new.stride, new.dtype, new.bytes)
            tensor = torch.empty_strided(new.size, new.stride, dtype=new.dtype, device=device)
            if new.bytes <= SMALL:
                tensor.fill_(nominal(name, new.dtype, number))
                if is_nominal or virtual:
                    mark_nominal(tensor)
            return tensor

        return made(result, make, tensors)

    def _as_it_is(
        self,
        func: torch._ops.OpOverload,
        info: OperatorInfo,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the operator; its results have values. Those that follow from nominal ones are marked."""
        returned = func(*args, **kwargs)
        if tensors and not all(map(is_computed, tensors)):
            for it in (*tensors_of(returned), *info.written_values(args, kwargs)):
                mark_nominal(it)
        return returned

    def _allocated(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        creates = not any(isinstance(it, Tensor) for it in args)
        if device.type == "cpu" and creates and not kwargs.get("pin_memory"):
            result = self._results.of(func, args, kwargs)
            if isinstance(result, New) and result.bytes > LARGE_ON_HOST:
                return reserved(result.size, result.stride, result.dtype, result.bytes)
        return func(*args, **kwargs)

    def _value(
        self,
        func: torch._ops.OpOverload,
        name: str,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        virtual: bool,
    ) -> Any:
        """An operator that returns no tensor: `item`, `equal`, questions about shapes."""
        on_device = any(not it.is_cpu for it in tensors)
        if name not in ("aten::_local_scalar_dense", "aten::equal"):
            return func(*args, **kwargs)
        if on_device:
            self.timeline.kernel(self.card.launch_us, waits=True, began_ns=time.monotonic_ns())
        dtype = tensors[0].dtype if name != "aten::equal" else torch.bool
        value = nominal(name, dtype) if virtual else func(*args, **kwargs)
        if not all(map(is_computed, tensors)):
            self.stand_ins.note(name.removeprefix("aten::").replace("_local_scalar_dense", "item"), value)
        return value


_KNOWN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _device_of(
    func: torch._ops.OpOverload, info: OperatorInfo, tensors: list[Tensor], kwargs: dict[str, Any]
) -> torch.device:
    """The device of an operator's results."""
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked)
    if not tensors:
        return torch.device("cpu")
    written = next(iter(info.written_values((), kwargs)), None)
    if written is not None:
        return written.device
    if info.returns_arguments:
        return tensors[0].device
    return next((it.device for it in tensors if it.dim() > 0 and not it.is_cpu), None) or next(
        (it.device for it in tensors if it.dim() > 0), tensors[0].device
    )


def _resize_outputs(
    func: torch._ops.OpOverload,
    info: OperatorInfo,
    result: Result,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Gives `out=` tensors the size that the operator would have given them."""
    plain = getattr(func.overloadpacket, "default", None)
    if plain is None or any(it.numel() for it in info.written_values(args, kwargs)):
        return
    outs = list(info.written_values(args, kwargs))
    raise NoResult(
        f"operator {func} resizes its out= argument, {tuple(outs[0].shape)}; pass one of the right size"
    )
