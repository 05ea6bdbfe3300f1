"""The mode under which a script runs dry: operators on large tensors allocate, and are not run."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_uvm._dry import plausible, unknown_shapes
from torch_uvm._dry.costs import copy_us, device_us, launches_of, precision, work_of
from torch_uvm._dry.host_memory import reserved
from torch_uvm._dry.results import New, NoResult, OperatorInfo, Result, Results, made, news, tensors_of
from torch_uvm._dry.sizes import Sizes
from torch_uvm._dry.timeline import Timeline
from torch_uvm._dry.values import (
    LARGE_ON_HOST,
    SMALL,
    StandIns,
    can_have_values,
    is_computed,
    is_virtual,
    mark_nominal,
    mark_written,
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
        cards: whose times `timeline` gets.
    """

    def __init__(self, *cards: Card) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cards = cards
        self.timeline = Timeline()
        self.stand_ins = StandIns()
        self.sizes = Sizes()
        self._results = Results()
        #: What an operator takes on each card, whether it is a convolution, and how many kernels it has, by
        #: all that this depends on. What a loop repeats is worked out once.
        self._costs: dict[object, tuple[tuple[float, ...], bool, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a dry run. PyTorch's wrapper would take some microseconds an operator."""
        return False

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
        tensors = tensors_of(args, kwargs)
        if func.namespace in _NOT_OURS or any(it.layout != torch.strided for it in tensors):
            return func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if name == "aten::_fused_sdp_choice":
            return _attention_kernel(*args, **kwargs)
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
        given = dict(zip(info.names, args, strict=False)) | kwargs
        unknown = unknown_shapes.depends_on_values(func, name, given)
        returned = self._returned(func, info, name, tensors, args, kwargs, given, unknown, virtual, device)
        if not info.returns_arguments:
            self._follow(name, returned, tensors, unknown_shapes.decided_by(name, given) if unknown else [])
        if device.type != "cpu" or any(not it.is_cpu for it in tensors):
            to_host = device.type == "cpu"
            known = None if unknown else self._results.key(func, args, kwargs, tensors)
            key = (known, to_host, *precision())
            cost = self._costs.get(key)
            if cost is None:
                written = info.written_values(args, kwargs)
                work = work_of(func, args, kwargs, returned, written)
                launches = launches_of(name, unknown)
                if name in _COPIES and (to_host or any(it.is_cpu for it in tensors)):
                    us = tuple(copy_us(work, it, to_host) for it in self.cards)
                else:
                    us = tuple(device_us(work, it) + (launches - 1) * it.launch_us for it in self.cards)
                cost = us, "convolution" in work.kind, launches
                if known is not None:
                    self._costs[key] = cost
            listed = len(args[0]) if args and isinstance(args[0], (list, tuple)) else 0
            self.timeline.kernel(
                cost[0],
                waits=to_host or unknown,
                began_ns=began,
                is_convolution=cost[1],
                listed=listed,
                launches=cost[2],
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
        given: dict[str, Any],
        unknown: bool,
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
        if unknown:
            if not virtual:
                return self._as_it_is(func, info, tensors, args, kwargs)
            result: Result = unknown_shapes.result_of(name, given)
        else:
            result = self._results.of(func, args, kwargs, tensors)
            most = SMALL if device.type != "cpu" else LARGE_ON_HOST
            is_known = not virtual and not (
                plausible.decides(name, tensors) and not all(map(is_computed, tensors))
            )
            if is_known and all(can_have_values(it.bytes, it.dtype, most) for it in news(result)):
                return self._as_it_is(func, info, tensors, args, kwargs)
        if info.writes_out:
            _resize_outputs(func, info, result, args, kwargs)
        is_nominal = virtual or not all(map(is_computed, tensors))

        def make(new: New) -> Tensor:
            if not can_have_values(new.bytes, new.dtype):
                if device.type == "cpu":
                    return reserved(new.size, new.stride, new.dtype, new.bytes)
                tensor = new.make(device)
                plausible.note_uniform(name, tensor)
                return tensor
            tensor = new.make(device)
            mark_written(tensor)
            plausible.fill(tensor, name, given)
            if is_nominal:
                mark_nominal(tensor)
            return tensor

        return made(result, make, tensors)

    def _follow(self, name: str, returned: Any, tensors: list[Tensor], deciding: list[Tensor]) -> None:
        """Finds out which results have sizes that follow from stand-ins: those of ``deciding`` operands."""
        results = tensors_of(returned)
        if not all(map(is_computed, deciding)):
            rows = results[0].size(0)
            key = self.stand_ins.note(name.removeprefix("aten::").strip("_"), f"{rows} rows")
            self.sizes.begin(key, results)
        self.sizes.follow(name, results, tensors)

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
        for it in tensors_of(returned):
            mark_written(it)
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
            new = self._results.of(func, args, kwargs, [])
            if isinstance(new, New) and not can_have_values(new.bytes, new.dtype, LARGE_ON_HOST):
                return reserved(new.size, new.stride, new.dtype, new.bytes)
        returned = func(*args, **kwargs)
        if creates:
            if can_have_values(returned.untyped_storage().nbytes(), returned.dtype):
                mark_written(returned)
            self.sizes.follow("", [returned], [])
        return returned

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
            self.timeline.kernel((), waits=True, began_ns=time.monotonic_ns())
        dtype = tensors[0].dtype if name != "aten::equal" else torch.bool
        value = plausible.assumed(name, dtype) if virtual else func(*args, **kwargs)
        if not all(map(is_computed, tensors)):
            what = name.removeprefix("aten::").replace("_local_scalar_dense", "item")
            key = self.stand_ins.note(what, value)
            if type(value) is int:
                self.sizes.tell(key, value)
        return value


_KNOWN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _attention_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *_: Any, **__: Any) -> int:
    """As on CUDA, where no fused kernel runs with a mask that requires a gradient (T5, on an H100)."""
    if not query.dim() == value.dim() == 4 or query.size(3) != value.size(3):
        return _MATH
    return _MATH if isinstance(mask, Tensor) and mask.requires_grad else _FLASH


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
