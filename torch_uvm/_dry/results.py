"""What an operator returns, without running it: from its schema, or from its meta kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map_only

from torch_uvm._util.containers import tensors_of

#: They return views, and do not say so.
_UNSAFE = frozenset({"aten::_unsafe_view", "aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes"})
#: Their result is reduced in the memory of all elements, which it keeps.
_LOSSES = frozenset(
    f"aten::{it}" for it in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
)
_MOST_RESULTS = 1 << 15  # cached


class NoResult(RuntimeError):
    """An operator's results cannot be known without running it. The message says what to do."""


@dataclass(frozen=True)
class Alias:
    """The result is the operator's tensor number ``number``, in the order of `tensors_of`."""

    number: int


@dataclass(frozen=True)
class New:
    """The result is a new tensor.

    Args:
        kept: bytes of its storage, where that has more than the result. 0: no more.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    kept: int = 0

    @property
    def bytes(self) -> int:
        """Of its storage."""
        if 0 in self.size:
            return self.kept
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return max(self.kept, int(extent * self.dtype.itemsize))

    def make(self, device: torch.device) -> Tensor:
        """A tensor like that."""
        if not self.kept:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        memory = torch.empty(self.kept // self.dtype.itemsize, dtype=self.dtype, device=device)
        return memory.as_strided(self.size, self.stride)


#: One of the above, a list or tuple of results, or a value that is no tensor.
Result = Any


class OperatorInfo:
    """What an operator's schema says.

    Args:
        is_view: returns a view of an argument, and touches no bytes.
        returns_arguments: all that it returns are arguments that it has written; no meta kernel is needed.
    """

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        given, returned = schema.arguments, schema.returns
        self.is_view = any(it.alias_info and not it.is_write for it in returned) or op.name() in _UNSAFE
        self.returns_arguments = all(it.is_write for it in returned)
        self.written = [at for at, it in enumerate(given) if it.is_write]
        self.names = [it.name for it in given]
        self.writes_out = any(it.is_out for it in given)
        # An alias set is a letter: by returned value, the argument with the same one.
        sets = [it.alias_info.before_set if it.alias_info else set() for it in given]
        self.returned = [
            next(at for at, names in enumerate(sets) if names & it.alias_info.before_set)
            for it in returned
            if it.alias_info and it.is_write
        ]
        self.returns_tensors = any("Tensor" in str(it.type) for it in returned)

    def argument(self, at: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The value of argument number ``at``; None if it is not given."""
        return args[at] if at < len(args) else kwargs.get(self.names[at])

    def written_values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors that the operator writes to."""
        for at in self.written:
            yield from tensors_of(self.argument(at, args, kwargs))


def meta_of(tensor: Tensor) -> Tensor:
    """A meta tensor of the same size, stride and dtype."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


class Results:
    """Finds results, and remembers them by operator and by the arguments' shapes."""

    def __init__(self) -> None:
        self.info = functools.cache(OperatorInfo)  #: by operator
        self._known: dict[object, Result] = {}

    def key(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> object | None:
        """What shapes and durations depend on; None: an argument cannot be hashed."""
        key = (op, _key(args, not tensors), _key(kwargs, not tensors) if kwargs else None)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def of(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], key: object | None
    ) -> Result:
        """The results of an operator that returns new tensors.

        Args:
            key: of `key`.

        Raises:
            NoResult: it has no meta kernel, or its results depend on values.
        """
        found = self._known.get(key) if key is not None else None
        if found is None:
            found = self._ask(op, args, kwargs)
            if len(self._known) >= _MOST_RESULTS:
                self._known.clear()
            if key is not None:
                self._known[key] = found
        return found

    def _ask(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Result:
        meta_args, meta_kwargs = tree_map_only(Tensor, meta_of, (tuple(args), dict(kwargs)))
        metas = tensors_of(meta_args, meta_kwargs)
        if "device" in self.info(op).names:
            meta_kwargs["device"] = torch.device("meta")
        meta_kwargs.pop("pin_memory", None)
        if isinstance(meta_kwargs.get("generator"), torch.Generator):
            meta_kwargs["generator"] = None
        meta_args = tuple(None if isinstance(it, torch.Generator) else it for it in meta_args)
        try:
            returned = op(*meta_args, **meta_kwargs)
        except NotImplementedError as error:
            raise NoResult(
                f"operator {op} has no meta kernel, so a dry run cannot know the shapes of its results; "
                f"register one with torch.library.register_fake({op.name().partition('.')[0]!r}), or leave "
                f"the operator out ({str(error).splitlines()[0]})"
            ) from None
        except torch._subclasses.fake_tensor.UnsupportedOperatorException as error:
            raise NoResult(f"operator {op} has results that a dry run cannot know: {error}") from None
        if op is torch.ops.aten.convolution.default:
            returned = _formatted(returned, meta_args[0], meta_args[1])
        elif op is torch.ops.aten.native_group_norm.default:
            returned = (_formatted(returned[0], meta_args[0]), *returned[1:])
        elif op is torch.ops.aten.native_group_norm_backward.default and returned[0] is not None:
            # The meta kernel promotes the gradient to the weight's dtype; devices return the input's.
            returned = (returned[0].to(meta_args[1].dtype), *returned[1:])
        numbers = {id(it): number for number, it in enumerate(metas)}

        def described(it: Tensor) -> Alias | New:
            if id(it) in numbers:
                return Alias(numbers[id(it)])
            return New(tuple(it.size()), tuple(it.stride()), it.dtype)

        result = tree_map_only(Tensor, described, returned)
        if op.name() in _LOSSES and isinstance(result, New) and not result.size:
            kept = torch.broadcast_shapes(*(it.shape for it in metas)).numel() * result.dtype.itemsize
            result = replace(result, kept=kept)
        return result


def _formatted(result: Tensor, *given: Tensor) -> Tensor:
    """A result in the format that devices give it.

    The meta kernels of convolutions, and of group norm in torch 2.14, do not look at formats.
    """
    formats = {suggest_memory_format(it) for it in given} - {torch.contiguous_format}
    return result.contiguous(memory_format=formats.pop()) if formats else result


def _key(value: Any, with_floats: bool) -> object:
    """What a result depends on. Values of floats change no shapes, but for operators that create tensors."""
    if isinstance(value, Tensor):
        return (value.size(), value.stride(), value.dtype, value.is_cpu)
    if isinstance(value, (list, tuple)):
        return tuple([_key(it, with_floats) for it in value])
    if isinstance(value, dict):
        return tuple([(name, _key(it, with_floats)) for name, it in value.items()])
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, float) and not with_floats:
        return float
    return (type(value), value)


def made(result: Result, make: Callable[[New], Tensor], tensors: Sequence[Tensor]) -> Any:
    """The results as values: new tensors are made by ``make``, aliases are taken from ``tensors``."""
    if isinstance(result, New):
        return make(result)
    if isinstance(result, Alias):
        return tensors[result.number]
    if isinstance(result, (list, tuple)):
        values = [made(it, make, tensors) for it in result]
        return values if isinstance(result, list) else tuple(values)
    return result
