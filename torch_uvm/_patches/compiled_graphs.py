"""Inductor's graphs and CUDA graphs under a budget: kernels that run without an operator.

Inductor's graphs launch kernels with addresses that they read once. To the residency engine each call of
such a graph is one operator: all inputs are made ready together, and pinned until the call returns, on
whatever thread. So that they fit, a large graph is compiled in pieces (graph_pieces.py). Backends that run
operators (`eager`, `aot_eager`) need nothing.

A CUDA graph keeps addresses: captured storages are pinned until the graph is reset or freed.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._patches.import_hooks import when_imported
from torch_uvm._patches.replace import replace_once

#: By identity: graphs are not hashable, and attributes set on them would be pickled with them.
_graphs: dict[int, _C.Unobserved] = {}


def _note(graph: Any, constants: Sequence[torch.Tensor] = ()) -> _C.Unobserved:
    """Notes what a compiled graph uses.

    Args:
        constants: tensors that it uses, beside its inputs.
    """
    written: frozenset[int] | None = None  # indices of inputs that it writes; None: all
    unwritten: type | None = None  # the only type of the other inputs that it does not write; None: any
    if hasattr(graph, "mutated_input_idxs") and hasattr(graph, "fx_kwargs"):
        written = frozenset(graph.mutated_input_idxs)
        # A backward may reuse the memory of tensors saved for it (donated buffers). Parameters are never
        # among them.
        unwritten = torch.nn.Parameter if graph.fx_kwargs.get("is_backward", True) else None
    if id(graph) not in _graphs:
        weakref.finalize(graph, _graphs.pop, id(graph), None).atexit = False
    known = _graphs[id(graph)] = _C.Unobserved("compiled graph", constants, written, unwritten)
    return known


def _held(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `plain`, the call of a compiled graph with the list of its inputs, which it may empty."""

    def __call__(self: Any, inputs: Sequence[Any]) -> Any:
        region = (_graphs.get(id(self)) or _note(self)).enter(inputs)
        if region is None:
            return plain(self, inputs)
        outputs = None
        try:
            outputs = plain(self, inputs)
        finally:
            _C.leave_region(region, outputs)
        return outputs

    return __call__


def _noting_constants(plain: Callable[..., None]) -> Callable[..., None]:
    def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        plain(self, example_inputs, constants, graph_kwargs)
        named = constants.unwrap(self)
        _note(self, [each for each in named.values() if isinstance(each, torch.Tensor)])

    return post_compile


def _in_pieces(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Inductor's entry point, which gets graphs from Dynamo."""
    compiling = threading.local()  # has `a_piece` while this thread does: the entry point calls itself

    @functools.wraps(plain)
    def compile_fx(model_: Any, example_inputs_: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        def compile_piece(piece: Any, inputs: Sequence[Any]) -> Any:
            compiling.a_piece = True
            try:
                return plain(piece, inputs, *args, **kwargs)
            finally:
                del compiling.a_piece

        most = None
        if not hasattr(compiling, "a_piece") and isinstance(model_, torch.fx.GraphModule):
            try:
                from torch_uvm._patches import graph_pieces
            except ImportError as error:
                warnings.warn(
                    f"torch_uvm cannot split graphs of torch {torch.__version__}: {error}; a compiled graph "
                    "takes all of its inputs at once, and may exceed the budget",
                    stacklevel=2,
                )
            else:
                most = graph_pieces.most_bytes(model_, example_inputs_)
        if most is None:
            return plain(model_, example_inputs_, *args, **kwargs)
        return graph_pieces.compile_pieces(model_, example_inputs_, most, compile_piece)

    return compile_fx


def _watch_calls(module: ModuleType) -> None:
    replace_once(module.CompiledFxGraph, "__call__", _held)
    replace_once(module.CompiledFxGraph, "post_compile", _noting_constants)
    if hasattr(module, "CompiledAOTI"):  # not in torch 2.11
        replace_once(module.CompiledAOTI, "__call__", _held)


# --- captures


def _beginning(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        _C.flush_all_pending()  # a deferred update inside the capture would run again at each replay
        plain(self, *args, **kwargs)
        capture = _C.begin_capture()
        if capture:
            release = weakref.finalize(self, _C.release_capture, capture)
            release.atexit = False
            vars(self)["_torch_uvm_capture"] = capture, release

    return capture_begin


def _ending(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def capture_end(self: Any) -> None:
        try:
            plain(self)
        finally:
            capture, _ = vars(self).get("_torch_uvm_capture", (0, None))
            if capture:
                _C.end_capture(capture)

    return capture_end


def _replaying(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def replay(self: Any) -> None:
        capture, _ = vars(self).get("_torch_uvm_capture", (0, None))
        if capture:
            _C.note_launch(capture)
        plain(self)

    return replay


def _resetting(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def reset(self: Any) -> None:
        plain(self)
        _, release = vars(self).pop("_torch_uvm_capture", (0, None))
        if release is not None:
            release()

    return reset


#: Methods of torch.cuda.CUDAGraph, and what replaces them.
_CAPTURES = {"capture_begin": _beginning, "capture_end": _ending, "replay": _replaying, "reset": _resetting}


def watch_graphs() -> None:
    """Patches the classes, Inductor's once Inductor is imported. Imports nothing."""
    when_imported("torch._inductor.output_code", _watch_calls)
    if _C.backend() == "cuda":  # not for the emulated accelerator of a CUDA build
        when_imported("torch._inductor.compile_fx", lambda it: replace_once(it, "compile_fx", _in_pieces))
        for name, wrap in _CAPTURES.items():
            replace_once(torch.cuda.CUDAGraph, name, wrap)
