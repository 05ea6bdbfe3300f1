"""`optimizer="deferred"`: the update of a large parameter waits for the parameter's next use.

A step under a budget fetches parameters, gradients and moments one after another, with no computation to
overlap. Deferred, each parameter's update runs right before the parameter's next use, so that its transfers
overlap the forward pass.

The arithmetic is PyTorch's own: its functions (`torch.optim.adam.adam` and the like) are called, and the
operators that they call are recorded instead of run, for each parameter, or small ones together
(csrc/tensor/dispatch/deferred_updates.h). What depends on time is captured at the step: hyper-parameters are
numbers, and step counts and versions of tensors increase at once. An update that cannot wait, or that might
give other bits, runs during the step.
"""

# ruff: noqa: C419  (lists, not generators: Python loses Ctrl-C when it closes an unfinished generator)

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    _default_to_fused_or_foreach,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from torch_uvm import _C
from torch_uvm._patches.automatic_updates import Automatic, is_in_backward
from torch_uvm._patches.replace import replace_once
from torch_uvm._util.containers import tensors_of

#: Modules of torch.optim whose function of the same name is replaced. AdamW uses Adam's.
_FUNCTIONS = ("adam", "sgd", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "radam")
#: Their lists of numbers, one tensor for each parameter: updated during the step.
_NUMBERS = ("state_steps", "mu_products")

#: Operators that do the same with each element of their lists.
_ON_EACH = ("aten::_foreach_", "aten::_fused_")

_lock = threading.Lock()
_on = False
_automatic: Automatic | None = None  # of "auto"
_stacks = False  # whether the profile that began last has them


class _Step(threading.local):
    optimizer: weakref.ref[Optimizer] | None = None


_step = _Step()
_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def choose(optimizer: str) -> None:
    """Sets when later steps update parameters, and runs the pending updates."""
    global _on, _automatic
    _C.set_option("optimizer", optimizer)
    if optimizer != "in_place":
        _watch()
    _automatic = Automatic() if optimizer == "auto" else None
    _on = optimizer == "deferred"
    _C.flush_all_pending()


def try_again() -> None:
    """The budget has changed: what "auto" has found may no longer hold."""
    global _automatic
    if _automatic is not None:
        _automatic = Automatic()


def chosen() -> str:
    """The value in the option table, which TORCH_UVM_CONF fills."""
    return next(option["value"] for option in _C.describe_options() if option["key"] == "optimizer")


class _Recorder(TorchDispatchMode):
    """Records the operators that use tensors of a device, as one update for each group of parameters.

    A fused operator, or one on lists, is one on each group's elements of its lists. Operators on `numbers`
    alone run at once.

    Args:
        operands: by group, tensors that no other group has.
    """

    def __init__(self, operands: Sequence[Sequence[torch.Tensor]], numbers: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.updates = [_C.DeferredUpdate(of_one[0].device) for of_one in operands]
        self.observed = True  # read in C++: other observers see this thread's operators
        self._at_once = {id(number) for number in numbers}
        self._owner = {id(tensor): at for at, of_one in enumerate(operands) for tensor in of_one}
        self._results: dict[int, torch.Tensor] = {}  # stand for the updates' future results
        self._without_bytes: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waits = any(
            [not tensor.is_cpu and id(tensor) not in self._at_once for tensor in tensors_of(args, kwargs)]
        )
        schema = func._schema
        if not waits:
            return self._run(func, args, kwargs)
        written = [returned.alias_info is not None for returned in schema.returns]
        results: Any = None
        made: list[torch.Tensor] = []
        if not written:
            self._count(func, args)
        elif not any(written):
            results = func(*self._meta(args), **self._meta(kwargs))
            made = tensors_of(results)
            self._results.update([(id(result), result) for result in made])
        elif all(written) and all([returned.alias_info.is_write for returned in schema.returns]):
            results = kwargs.get("out", args[0])
        else:
            raise _unknown(schema)
        call = (schema.name, schema.overload_name, tuple(args), dict(kwargs), made)
        values = (*args, *kwargs.values())
        if schema.name.startswith(_ON_EACH):
            lists = [value for value in values if isinstance(value, (list, tuple)) and value]
            owners = [self._owner_of(schema, each) for each in zip(*lists, strict=True)]
            self._owner.update([(id(result), owner) for result, owner in zip(made, owners, strict=False)])
            _C.add_each([self.updates[owner] for owner in owners], *call)
        else:
            owner = self._owner_of(schema, tensors_of(values))
            self._owner.update([(id(result), owner) for result in made])
            self.updates[owner].add(*call)
        return results

    def _owner_of(self, schema: Any, used: Iterable[Any]) -> int:
        owners = {self._owner[id(each)] for each in used if id(each) in self._owner}
        if len(owners) != 1:
            raise _unknown(schema)
        return owners.pop()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        versions = [tensor._version for tensor in tensors_of(args[:1])]
        results = _C.call_observed(self, func, *args, **kwargs)
        if not func._schema.returns and versions == [tensor._version for tensor in tensors_of(args[:1])]:
            self._count(func, args)
        return results

    def _count(self, func: Any, args: Any) -> None:
        """Increments the versions of written tensors as the operator itself would.

        A list's versions are incremented in the kernel, a single tensor's before the operator is recorded,
        and those of a fused operator's outputs not at all.
        """
        if not func._schema.name.startswith("aten::_fused_"):
            # A list: PyTorch would lose a Ctrl-C that interrupts a generator here.
            torch.autograd.graph.increment_version([t for t in args[0] if id(t) not in self._results])

    def _meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self._results or value.is_cpu:
                return value
            known = self._without_bytes.get(id(value))
            if known is None:
                known = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                self._without_bytes[id(value)] = known
            return known
        if isinstance(value, dict):
            return {key: self._meta(member) for key, member in value.items()}
        return type(value)(map(self._meta, value)) if isinstance(value, (list, tuple)) else value


def _unknown(schema: Any) -> RuntimeError:
    return RuntimeError(f'optimizer="deferred" cannot have {schema}; report it, and use "in_place"')


def _operands(arguments: dict[str, Any]) -> tuple[list[list[Any]], list[list[Any]]] | None:
    """Lists with a tensor, and lists with a number, for each parameter; None: the update cannot wait."""
    length = len(arguments["params"])
    tensors: list[list[Any]] = []
    numbers: list[list[Any]] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            return None  # a learning rate or gradient scale: it may change first
        if isinstance(value, list) and value:
            if len(value) != length or not all(
                [type(t) in (torch.Tensor, torch.nn.Parameter) for t in value]
            ):
                return None
            (numbers if name in _NUMBERS else tensors).append(value)
    return tensors, numbers


def _overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether two of these dense tensors have bytes in common."""
    ranges = sorted(
        [(t.untyped_storage()._cdata, t.storage_offset() * t.itemsize, t.nbytes) for t in tensors]
    )
    return any(
        [one[0] == other[0] and one[1] + one[2] > other[1] for one, other in itertools.pairwise(ranges)]
    )


def _deferrable(arguments: dict[str, Any]) -> list[list[int]]:
    """The indices of the parameters whose update can wait, in groups that are updated together."""
    if any(
        [arguments.get(name) for name in ("capturable", "differentiable", "has_sparse_grad", "has_complex")]
    ):
        return []
    operands = _operands(arguments)
    if operands is None or (arguments["params"][0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return []
    tensors, numbers = operands
    if arguments.get("nesterov") and _overlap(tensors[1]):
        return []  # operators on lists write gradients: all of them before the first parameter
    _C.flush_pending([tensor for each in (*tensors, *numbers) for tensor in each])  # of the previous step
    return _C.deferrable(tensors)


def _part(arguments: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    return {
        name: [value[index] for index in indices] if isinstance(value, list) and value else value
        for name, value in arguments.items()
    }


def _without_common_operands(arguments: dict[str, Any], groups: list[list[int]]) -> list[list[list[int]]]:
    """All groups, or each parameter alone if two have a tensor in common, such as a gradient."""
    indices = [index for group in groups for index in group]
    tensors, _ = _operands(_part(arguments, indices)) or ([], [])
    used = [id(tensor) for each in tensors for tensor in each]
    return [groups] if len(set(used)) == len(used) else [[[index]] for index in indices]


def _deferring(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `plain`, a function of torch.optim that updates lists of parameters."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        optimizer = None if _step.optimizer is None else _step.optimizer()
        if not _defers() or optimizer is None or not _C.is_enabled():
            return plain(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        groups = _deferrable(arguments) if arguments["params"] else []
        if not groups:
            return plain(*args, **kwargs)
        _choose_kernels(arguments)
        updates = []
        counted = []  # numbers, and what they were
        try:
            for recorded in _without_common_operands(arguments, groups):
                bound.arguments = _part(arguments, [index for group in recorded for index in group])
                tensors, numbers = _operands(bound.arguments) or ([], [])
                counted += [(each, torch._foreach_add(each, 0)) for each in numbers]
                of_each = iter(list(zip(*tensors, strict=True)))
                operands = [tensors_of([*itertools.islice(of_each, len(group))]) for group in recorded]
                recorder = _Recorder(operands, tensors_of(numbers))
                # Not `with`: Ctrl-C inside the entry or exit of a mode leaves torch's stack of modes
                # inconsistent.
                try:
                    _C.begin_recording(recorder)
                    # As torch.optim does: it looks for `state_steps` by position.
                    plain(*bound.args, **bound.kwargs)
                finally:
                    _C.end_recording(recorder)
                updates += recorder.updates
        except BaseException:
            for each, before in counted:  # no update is pending: the step has not been taken
                torch._foreach_copy_(each, before)
            raise
        _C.defer(updates)
        if optimizer not in _known:
            _known.add(optimizer)
            # The optimizer's tensors must not outlive it in pending updates.
            weakref.finalize(optimizer, _C.flush_all_pending).atexit = False
        rest = sorted(set(range(len(arguments["params"]))).difference(*groups))
        if rest:
            bound.arguments = _part(arguments, rest)
            plain(*bound.args, **bound.kwargs)
        return None

    return call


def _choose_kernels(arguments: dict[str, Any]) -> None:
    """Chooses foreach or not for all parameters together, as the function itself would."""
    if arguments["foreach"] is None and arguments.get("fused") is None:
        arguments["foreach"] = _default_to_fused_or_foreach(
            arguments["params"], differentiable=False, use_fused=False
        )[1]
        if "fused" in arguments:
            arguments["fused"] = False


def _profiling(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the start of a profile. One with stacks reads addresses of modules' and optimizers' tensors."""

    @functools.wraps(plain)
    def start(self: Any) -> None:
        global _stacks
        _stacks = self.with_stack
        if _stacks:
            _C.flush_all_pending()
        plain(self)

    return start


def _defers() -> bool:
    if _stacks and torch.autograd.profiler._is_profiler_enabled:
        return False
    automatic = _automatic
    return _on if automatic is None else automatic.defers and not is_in_backward()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _step.optimizer = weakref.ref(optimizer)
        automatic = _automatic
        if automatic is not None and _C.is_enabled():
            automatic.before_step(optimizer)


def _watch() -> None:
    """Replaces the functions. Calling it again does nothing."""
    with _lock:
        if _before_step in _global_optimizer_pre_hooks.values():
            return
        for name in _FUNCTIONS:
            module = importlib.import_module(f"torch.optim.{name}")
            replace_once(module, name, _deferring)
        replace_once(torch.autograd.profiler.profile, "_start_trace", _profiling)
        register_optimizer_step_pre_hook(_before_step)
