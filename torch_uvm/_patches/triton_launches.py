"""Triton kernels that Python launches: no operator of PyTorch runs them.

To the residency engine each launch is one operator on the kernel's tensors: they are made ready together,
pinned until it is queued, and planned. All count as written, but those that the kernel annotates as
`tl.const`. Launches of autotuning count, too. Inductor's kernels are launched by its graphs
(compiled_graphs.py).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._patches.import_hooks import when_imported
from torch_uvm._patches.replace import replace_once

#: By kernel, and by which tensors a launch writes. By identity: kernels hash by their source.
_known: dict[int, dict[frozenset[int], _C.Unobserved]] = {}


def _collect(value: Any, is_const: bool, tensors: list[torch.Tensor], written: list[int]) -> None:
    """Appends the tensors in an argument: one, a tuple of them, or a descriptor or wrapper with a `base`."""
    if not isinstance(value, (torch.Tensor, tuple)):
        value = getattr(value, "base", None)
    if isinstance(value, torch.Tensor):
        if not is_const:
            written.append(len(tensors))
        tensors.append(value)
    elif isinstance(value, tuple):
        for each in value:
            _collect(each, is_const, tensors, written)


def _launch(kernel: Any, written: Iterable[int]) -> _C.Unobserved:
    if id(kernel) not in _known:
        _known[id(kernel)] = {}
        weakref.finalize(kernel, _known.pop, id(kernel), None).atexit = False
    launches, key = _known[id(kernel)], frozenset(written)
    if key not in launches:
        launches[key] = _C.Unobserved(kernel.__name__, (), key, None)
    return launches[key]


def _observed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `plain`, which launches a kernel on its arguments."""

    @functools.wraps(plain)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        written: list[int] = []
        if not warmup:
            # The interpreter's kernels do not know which parameters are const.
            consts = {it.name for it in getattr(self, "params", ()) if it.is_const}
            names = (*self.arg_names, *[""] * len(args))  # more than named ones, if it takes *args
            for name, value in (*zip(names, args), *kwargs.items()):  # noqa: B905
                _collect(value, name in consts, tensors, written)
        region = _launch(self, written).enter(tensors) if tensors else None
        try:
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            if region is not None:
                _C.leave_region(region, None)

    return run


def watch_launches() -> None:
    """Patches Triton's launchers once Triton is imported. Imports nothing."""

    def patch(name: str) -> Callable[[ModuleType], None]:
        return lambda module: replace_once(getattr(module, name), "run", _observed)

    when_imported("triton.runtime.jit", patch("JITFunction"))
    when_imported("triton.runtime.interpreter", patch("InterpretedFunction"))
