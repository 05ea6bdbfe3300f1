"""Scopes that can be entered again while they are open, also by other threads."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

from torch_uvm._util.arguments import show
from torch_uvm._util.compiler import break_the_graph

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ReentrantScope(ContextDecorator):
    """A context manager and a decorator; each entry is a scope of its own.

    Leaving ends the calling thread's last entry. If it has none, the last entry of any thread is ended: a
    generator may be entered by one thread and be closed, or collected, by another.

    Args:
        name: as messages show it.
        begin: opens a scope, and returns an entry. If Ctrl-C comes before that is noted, dropping it must end
            the scope.
        end: is called with the entry.
    """

    def __init__(self, name: str, begin: Callable[[], Any], end: Callable[[Any], None]) -> None:
        self._name, self._begin, self._end = name, begin, end
        self._lock = threading.Lock()
        self._open: list[tuple[int, Any]] = []  # with the threads that entered, oldest first

    def __repr__(self) -> str:
        return self._name

    def __call__(self, func: _Function) -> _Function:
        # The bodies of others run when the scope is closed, or interleaved with other code of the thread.
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if not callable(func) or inspect.isclass(func) or any(it(func) for it in kinds):
            raise TypeError(
                f"{self!r} decorates {show(func)}; accepted: plain functions (open the scope inside "
                "generators, coroutines and classes)"
            )
        return super().__call__(func)

    def __enter__(self) -> ReentrantScope:
        entry = threading.get_ident(), self._begin()
        with self._lock:
            self._open.append(entry)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if not self._open:
                raise RuntimeError(f"{self!r} is left, but not open")
            me = threading.get_ident()
            # A list: Python loses Ctrl-C when it closes an unfinished generator.
            mine = [index for index, (owner, _) in enumerate(self._open) if owner == me]
            _, entry = self._open.pop(mine[-1] if mine else -1)
        self._end(entry)


class EagerScope(ReentrantScope):
    """A scope that torch.compile enters and leaves between graphs."""

    @break_the_graph
    def __enter__(self) -> ReentrantScope:
        return super().__enter__()

    @break_the_graph
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
