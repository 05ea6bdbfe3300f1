"""Whether a tensor made now is managed, as the calling thread has it: scopes over the process's switch."""

from __future__ import annotations

import inspect
import threading
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from torch_uvm import _C
from torch_uvm._patches import install
from torch_uvm._residency import budget
from torch_uvm._util.arguments import exact_keywords, show
from torch_uvm._util.runtime import check_runtime


@exact_keywords
def is_enabled() -> bool:
    """Whether a tensor made now by this thread would be managed.

    The innermost scope of the thread says so, and without one the process-wide switch.
    """
    return _C.is_enabled()


class SwitchScope(ContextDecorator):
    """What `enabled()` and `disabled()` return: a context manager and a decorator.

    One object can be entered again while it is open, also by other threads; each entry is a scope of
    the thread that made it. Leaving closes the calling thread's last entry; where it has none, the last
    of any thread: a generator may be entered by one thread and be closed, or collected, by another.
    """

    def __init__(self, on: bool) -> None:
        self._on = on
        self._lock = threading.Lock()
        self._open: list[tuple[int, _C.Scope]] = []  # with the threads that entered, oldest first

    def _recreate_cm(self) -> SwitchScope:
        return SwitchScope(self._on)

    def _open_scope(self) -> _C.Scope:
        return _C.Scope(self._on)

    def __call__(self, func: Any) -> Any:
        # Their bodies run later, when the scope is closed, or between other code of the thread.
        later = inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func)
        if later or inspect.iscoroutinefunction(func) or not callable(func) or inspect.isclass(func):
            raise TypeError(
                f"{self!r} decorates {show(func)}; accepted: plain functions (open the scope inside "
                "generators, coroutines and classes)"
            )
        return super().__call__(func)

    def __enter__(self) -> SwitchScope:
        if self._on:
            check_runtime(repr(self))
            install.for_managed_tensors()
            budget.request_default()
        entry = threading.get_ident(), self._open_scope()
        with self._lock:
            self._open.append(entry)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            if not self._open:
                raise RuntimeError(f"{self!r} is left, but not open")
            me = threading.get_ident()
            mine = (index for index in reversed(range(len(self._open))) if self._open[index][0] == me)
            _, scope = self._open.pop(next(mine, -1))
        scope.close()
        if not _C.is_enabled():
            _C.flush_all_pending()

    def __repr__(self) -> str:
        return "torch_uvm.enabled()" if self._on else "torch_uvm.disabled()"


@exact_keywords
def enabled() -> SwitchScope:
    """A scope in which new tensors on the accelerator are managed.

    A context manager and a decorator. It holds for the thread that opens it and for the threads that
    run its backward, not for other threads. It takes no options: limit, budget and moves are the
    process's, and what `enable` said of them holds here, too.

    >>> with torch_uvm.enabled():
    ...     x = torch.ones(4, device=torch.accelerator.current_accelerator())
    >>> @torch_uvm.enabled()
    ... def step(): ...
    """
    return SwitchScope(True)


@exact_keywords
def disabled() -> SwitchScope:
    """A scope in which new tensors get ordinary memory; otherwise as `enabled`."""
    return SwitchScope(False)
