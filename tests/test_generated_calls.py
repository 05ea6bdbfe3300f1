"""Calls of the public face that hypothesis makes up from the signatures.

Each gives a result or a documented error; none ends the process; one that raises has changed nothing.
`make bad-input` makes 10 000 of them, with CALLS= another number; `make test` some hundreds, always the same.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_uvm
from torch_uvm import _C, emulated

CALLS = int(os.environ.get("TORCH_UVM_CALLS", "500"))
LIMIT = 64 << 20

#: What a wrong call raises: OutOfMemoryError and NotImplementedError are RuntimeErrors, files raise OSErrors.
ERRORS = (TypeError, ValueError, RuntimeError, OSError)
DOCUMENTED = {"from_dlpack": (*ERRORS, BufferError)}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch_uvm, name) for name in torch_uvm.__all__ if name not in ("Allocator", "emulated")},
    **{f"emulated.{name}": getattr(emulated, name) for name in emulated.__all__},
    "Allocator.caching": torch_uvm.Allocator.caching,
    "Allocator.pool": torch_uvm.Allocator.pool,
    "Allocator.process": torch_uvm.Allocator.process,
    **{
        f"Allocator.process().{name}": getattr(torch_uvm.Allocator.process(), name)
        for name in ("with_limit", "with_statistics", "with_failure_callback", "with_log", "stats")
    },
}

_NUMBERS = [-(2**63), -1, 0, 1, 2, 7, 1000, 2**46, 2**63 - 1, 2**64, 10**30]
_TEXTS = [
    "",
    "auto",
    "none",
    "80%",
    "101%",
    "4MiB",
    "-1",
    "1e9",
    "copy",
    "alias",
    "deferred",
    "in_place",
    "x",
]
_TEXTS += [
    "\0",
    "\x1b[2J",
    "\ud800",
    "emu",
    "emu:0",
    "emu:7",
    "emu:-1",
    "cpu",
    "cuda",
    "cuda:0",
    "meta",
    "a" * 5000,
]


def _self_referring() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


#: Made anew for each call: a call may change them.
_OBJECTS: dict[str, Callable[[], Any]] = {
    "managed": lambda: torch_uvm.ones(4, 4, device="emu"),
    "view": lambda: torch_uvm.ones(8, 8, device="emu")[::2, 1:].t(),
    "leaf": lambda: torch_uvm.ones(4, device="emu", requires_grad=True),
    "plain": lambda: torch.ones(3, device="emu"),
    "cpu": lambda: torch.ones(3),
    "none in it": lambda: torch_uvm.empty(0, device="emu"),
    "expanded": lambda: torch_uvm.ones(1, device="emu").expand(2**40),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "module": lambda: torch.nn.Linear(2, 2),
    "optimizer": lambda: torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1),
    "containers": lambda: {"a": [torch_uvm.ones(4, 4, device="emu"), (torch.ones(2),)], "b": {}},
    "loop": _self_referring,
    "stream": lambda: torch.Stream(device="emu"),
    "function": lambda: lambda *_: False,
    "allocator": torch_uvm.Allocator.caching,
    "capsule": lambda: torch.ones(2).__dlpack__(),
    "object": object,
    "class": lambda: dict,
    "nothing": lambda: Ellipsis,
}


def _object(name: str) -> Callable[[], Any]:
    return _OBJECTS[name]


_PLAIN = st.sampled_from(
    [None, True, False, 0.0, -1.5, float("nan"), float("inf"), 1j, b"x", (), [], {}, (2, 3), [1000, 1000]]
    + [(2**46, 2**46), (-1,), (2.5,), ("2",), _NUMBERS, torch.float32, torch.int8, torch.qint8, torch.strided]
    + [
        torch.sparse_coo,
        torch.preserve_format,
        torch.channels_last,
        torch.device("cpu"),
        torch.device("meta"),
    ]
    + [torch.device("emu", 0), Path("file"), Path("no/such/folder/file")]
).map(lambda it: lambda: it)
_ANY = st.one_of(
    _PLAIN,
    st.sampled_from(_NUMBERS + _TEXTS).map(lambda it: lambda: it),
    st.sampled_from(sorted(_OBJECTS)).map(_object),
)


def _of(*values: Any) -> st.SearchStrategy[Callable[[], Any]]:
    return st.sampled_from(values).map(lambda it: lambda: it)


_TENSORS = st.sampled_from(["managed", "view", "leaf", "plain", "cpu", "module"]).map(_object)
#: What suits a parameter, by its name: half of the time, so that calls get further than the first check.
_FITTING: dict[str, st.SearchStrategy[Callable[[], Any]]] = {
    "device": _of("emu", "cpu", "emu:0", 0, None, torch.device("emu")),
    "limit": _of("4MiB", LIMIT, None, 0),
    "budget": _of("auto", "8MiB", "50%", None),
    "size": _of(3, (2, 3), [4], 0, (1000, 1000), (2**46,)),
    "dtype": _of(torch.float16, torch.int64, torch.bool, None),
    "managed": _of(True, False, None),
    "copy": _of(True, False),
    "path": _of("log.csv", Path("trace.jsonl")),
    "name": _of("a plan", "another"),
    **dict.fromkeys(["x", "tensor", "tensor_or_module", "obj", "input"], _TENSORS),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Callable[[], Any]], dict[str, Callable[[], Any]]]:
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    positional: list[Callable[[], Any]] = []
    keywords: dict[str, Callable[[], Any]] = {}
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        value = st.one_of(_FITTING.get(parameter.name, _ANY), _ANY)
        match parameter.kind:
            case parameter.POSITIONAL_ONLY | parameter.POSITIONAL_OR_KEYWORD:
                if len(keywords) == 0 and draw(st.integers(0, 9)) < 8:
                    positional.append(draw(value))
                elif draw(st.booleans()):
                    keywords[parameter.name] = draw(value)
            case parameter.VAR_POSITIONAL:
                if not keywords:
                    positional += draw(st.lists(value, max_size=2))
            case parameter.KEYWORD_ONLY:
                if draw(st.integers(0, 9)) < 3:
                    keywords[parameter.name] = draw(value)
            case _:
                some = st.sampled_from(["device", "dtype", "size", "limit", "requires_grad", "pin_memory"])
                keywords |= draw(st.dictionaries(some, _ANY, max_size=2))
    if draw(st.integers(0, 19)) == 0:
        keywords["no_such_keyword"] = draw(_ANY)
    return name, positional, keywords


def state() -> dict[str, Any]:
    """All that a call which is refused might have changed. What asking for memory may free is left out."""
    return {
        "enabled": torch_uvm.is_enabled(),
        "limit": _C.get_limit(),
        "options": _C.describe_options(),
        "budget": _C.requested_budget(0),
        "host tensors": _C.host_tensors(),
        "allocated": torch_uvm.memory_allocated(),
        "plain": torch.accelerator.memory_allocated() - torch_uvm.memory_allocated(0),
        "device": torch.accelerator.current_device_index(),
        "stream": torch.accelerator.current_stream(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }


def as_it_was() -> None:
    torch_uvm.disable()
    torch_uvm._patches.tensor_to.choose_moves(False)
    _C.set_host_tensors(False)
    _C.stop_recording_allocations()
    torch_uvm.set_limit(LIMIT)
    _C.request_budget(None, None)


def use(result: Any) -> None:
    """A scope is for entering, and nothing stays behind."""
    if hasattr(result, "__enter__") and not isinstance(result, torch.Tensor | torch.Stream):
        with result:
            pass


@pytest.fixture
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    as_it_was()


@pytest.mark.usefixtures("in_a_folder_of_its_own")
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=CALLS,
    deadline=None,
    derandomize="TORCH_UVM_CALLS" not in os.environ,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(calls())
def test_a_result_or_a_documented_error_that_changed_nothing(
    call: tuple[str, list[Callable[[], Any]], dict[str, Callable[[], Any]]],
) -> None:
    name, positional, keywords = call
    as_it_was()
    arguments = [it() for it in positional]
    named = {key: it() for key, it in keywords.items()}
    before = state()
    try:
        result = FUNCTIONS[name](*arguments, **named)
    except DOCUMENTED.get(name, ERRORS) as error:
        assert str(error)
        del error
        assert state() == before
        return
    try:
        use(result)
    except ERRORS as error:
        assert str(error)
    del result


def test_every_public_function_is_called() -> None:
    assert {name for name in torch_uvm.__all__ if callable(getattr(torch_uvm, name))} - {"Allocator"} <= set(
        FUNCTIONS
    )
    for function in FUNCTIONS.values():
        inspect.signature(function)  # has one
