"""The mode under which a script runs dry: operators on large tensors allocate, and are not run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_uvm._dry import plausible, unknown_shapes
from torch_uvm._dry.costs import Work, copy_us, device_us, precision, work_of
from torch_uvm._dry.cuda_names import translated
from torch_uvm._dry.results import New, NoResult, OperatorInfo, Result, Results, made
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
    reserved,
)
from torch_uvm._tools.cards import Card
from torch_uvm._util.containers import tensors_of

_MATH, _FLASH = 0, 1  # of torch.nn.attention.SDPBackend
#: They allocate, and write nothing.
_ALLOCATE = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream"}
)
#: Collectives: those of the group of `left_out.py` return at once.
_NOT_OURS = frozenset({"c10d", "_c10d_functional"})
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
#: They say whether gradients are finite; in a dry run they always are.
_FINITE = frozenset({"aten::_amp_foreach_non_finite_check_and_unscale_"})


@dataclass(slots=True)
class _Call:
    """An operator, its arguments, and the tensors among them. ``name`` is without the overload.

    ``virtual``: an operand has no values.
    """

    op: torch._ops.OpOverload
    name: str
    info: OperatorInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    virtual: bool

    def run(self) -> Any:
        return self.op(*self.args, **self.kwargs)

    def run_and_mark(self) -> Any:
        """Runs it; the results have values. Those that follow from nominal ones are marked."""
        returned = self.run()
        for it in tensors_of(returned):
            mark_written(it)
        if not self.is_computed():
            for it in (*tensors_of(returned), *self.written()):
                mark_nominal(it)
        return returned

    def written(self) -> Iterator[Tensor]:
        """The operands that it writes to."""
        return self.info.written_values(self.args, self.kwargs)

    def is_computed(self) -> bool:
        """Whether all operands have the values of a real run."""
        return all(map(is_computed, self.tensors))

    def is_on_host(self) -> bool:
        return all(it.is_cpu for it in self.tensors)

    def device(self) -> torch.device:
        """The results' device."""
        asked = self.kwargs.get("device")
        if asked is not None:
            return torch.device(asked)
        if not self.tensors:
            return torch.device("cpu")
        written = next(self.info.written_values((), self.kwargs), None)
        if written is not None:
            return written.device
        if self.info.returns_arguments:
            return self.tensors[0].device
        of = [it.device for it in self.tensors if it.dim() > 0] or [self.tensors[0].device]
        return next((it for it in of if it.type != "cpu"), of[0])


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
        #: What an operator takes on each card, and does, by all that this depends on. What a loop repeats is
        #: worked out once.
        self._costs: dict[object, tuple[tuple[float, ...], Work]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a dry run. PyTorch's wrapper would take some microseconds an operator."""
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type[Tensor], ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:  # of a call that no function mode saw, such as one in a backward
            kwargs = {**kwargs, "device": translated(kwargs["device"])}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # it asks for shapes, as DTensor does; nothing is allocated
        if any(it.__torch_dispatch__ is not Tensor.__torch_dispatch__ for it in types):
            return NotImplemented  # a wrapper: it calls operators on what it wraps
        info = self._results.info(func)
        if info.is_view or torch.Tag.inplace_view in func.tags:  # such as transpose_
            self.timeline.view()
            return func(*args, **kwargs)
        tensors = tensors_of(args, kwargs)
        is_sparse = "sparse_coo_tensor" in func.name() or any(it.layout != torch.strided for it in tensors)
        if func.namespace in _NOT_OURS or is_sparse:
            return func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if name == "aten::_fused_sdp_choice":
            return _attention_kernel(*args, **kwargs)
        if name == "aten::_embedding_bag_backward" and args[9]:  # the gradient is sparse
            func, args = (
                torch.ops.aten._embedding_bag_sparse_backward.default,
                (*args[:5], *args[6:9], *args[10:]),
            )
        if func.name().endswith("sparse_backward"):
            with self:
                return func.decompose(*args, **kwargs)
        call = _Call(func, name, info, args, kwargs, tensors, any(map(is_virtual, tensors)))
        device = call.device()
        if device.type == "meta":
            return call.run()
        if device.type == "cpu" and not call.virtual and tensors and call.is_on_host():
            return call.run_and_mark()
        if not info.returns_tensors and not info.returns_arguments:
            return self._value(call)
        if name in _ALLOCATE:
            return self._allocated(call, device)
        if name == "aten::_pin_memory":
            return tensors[0] if call.virtual else call.run()
        began = time.monotonic_ns()
        given = dict(zip(info.names, args, strict=False)) | kwargs
        deciding = unknown_shapes.decided_by(func, name, given)
        unknown = bool(deciding)
        key = None if unknown else self._results.key(func, args, kwargs, tensors)
        returned = self._returned(call, given, unknown, key, device)
        if not info.returns_arguments:
            self._follow(name, returned, tensors, deciding)
        if device.type != "cpu" or not call.is_on_host():
            self._note_time(call, returned, unknown, key, device.type == "cpu", began)
        return returned

    def _note_time(
        self, call: _Call, returned: Any, unknown: bool, known: object | None, to_host: bool, began_ns: int
    ) -> None:
        """Adds the operator to the timeline. ``known``: its key in the results."""
        is_copy = call.name in _COPIES
        of_host = [it for it in call.tensors if is_copy and it.is_cpu]
        pinned = bool(of_host) and all(it.is_pinned() for it in of_host)
        key = (known, to_host, pinned, *precision())
        cost = self._costs.get(key)
        if cost is None:
            work = work_of(call.op, call.args, call.kwargs, returned, call.written(), unknown)
            if is_copy and (to_host or of_host):
                us = tuple(copy_us(work, it, to_host, pinned) for it in self.cards)
            else:
                us = tuple(device_us(work, it) for it in self.cards)
            cost = us, work
            if known is not None:
                self._costs[key] = cost
        us, work = cost
        self.timeline.kernel(
            us,
            waits=to_host or unknown,
            began_ns=began_ns,
            is_convolution="convolution" in work.kind,
            listed=len(call.args[0]) if call.args and isinstance(call.args[0], (list, tuple)) else 0,
            launches=work.launches,
        )
        if to_host and not call.is_computed():
            self.stand_ins.note("copy to the host", "no values")

    def _returned(
        self, call: _Call, given: dict[str, Any], unknown: bool, key: object | None, device: torch.device
    ) -> Any:
        """What the operator returns.

        Args:
            given: its arguments by name.
            unknown: shapes depend on values.
            key: its key in the results.
        """
        info, name, tensors = call.info, call.name, call.tensors
        if info.returns_arguments and not info.writes_out:
            if not call.virtual:
                return call.run_and_mark()
            if name in _FINITE:
                self.stand_ins.note("gradients that overflow", "none")
            else:
                for it in call.written():
                    mark_nominal(it)
            returned = [info.argument(at, call.args, call.kwargs) for at in info.returned]
            return tuple(returned) if len(returned) > 1 else returned[0] if returned else None
        if unknown:
            if not call.virtual:
                return call.run_and_mark()
            result: Result = unknown_shapes.RESULTS[name](given)
        else:
            result = self._results.of(call.op, call.args, call.kwargs, key)
            most = SMALL if device.type != "cpu" else LARGE_ON_HOST
            is_known = not call.virtual and (not plausible.decides(name, tensors) or call.is_computed())
            is_known = is_known and "cudnn" not in name  # the CPU has none of these
            if is_known and all(
                can_have_values(it.bytes, it.dtype, most) for it in tree_leaves(result) if isinstance(it, New)
            ):
                return call.run_and_mark()
        if info.writes_out:
            _check_outputs(call)
        is_nominal = call.virtual or not call.is_computed()

        def make(new: New) -> Tensor:
            has_values = can_have_values(new.bytes, new.dtype)
            if not has_values and device.type == "cpu":
                return reserved(new)
            tensor = new.make(device)
            if not has_values:
                plausible.note_uniform(name, tensor)
                return tensor
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

    def _allocated(self, call: _Call, device: torch.device) -> Any:
        creates = not any(isinstance(it, Tensor) for it in call.args)
        if device.type == "cpu" and creates and not call.kwargs.get("pin_memory"):
            key = self._results.key(call.op, call.args, call.kwargs, [])
            new = self._results.of(call.op, call.args, call.kwargs, key)
            if isinstance(new, New) and not can_have_values(new.bytes, new.dtype, LARGE_ON_HOST):
                return reserved(new)
        returned = call.run()
        if creates:
            if can_have_values(returned.untyped_storage().nbytes(), returned.dtype):
                mark_written(returned)
            self.sizes.follow("", [returned], [])
        return returned

    def _value(self, call: _Call) -> Any:
        """An operator that returns no tensor: `item`, `equal`, questions about shapes."""
        name = call.name
        if name not in ("aten::_local_scalar_dense", "aten::equal"):
            return call.run()
        if not call.is_on_host():
            self.timeline.kernel((), waits=True, began_ns=time.monotonic_ns())
        dtype = call.tensors[0].dtype if name != "aten::equal" else torch.bool
        value = plausible.assumed(name, dtype) if call.virtual else call.run()
        if not call.is_computed():
            what = name.removeprefix("aten::").replace("_local_scalar_dense", "item")
            key = self.stand_ins.note(what, value)
            if type(value) is int:
                self.sizes.tell(key, value)
        return value


def _attention_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *_: Any, **__: Any) -> int:
    """As on CUDA, where no fused kernel runs with a mask that requires a gradient (T5, on an H100)."""
    if not query.dim() == value.dim() == 4 or query.size(3) != value.size(3):
        return _MATH
    return _MATH if isinstance(mask, Tensor) and mask.requires_grad else _FLASH


def _check_outputs(call: _Call) -> None:
    """Refuses empty `out=` tensors: the operator would resize them."""
    outs = list(call.written())
    if hasattr(call.op.overloadpacket, "default") and not any(it.numel() for it in outs):
        raise NoResult(
            f"operator {call.op} resizes its out= argument, {tuple(outs[0].shape)}; "
            f"pass one of the right size"
        )
