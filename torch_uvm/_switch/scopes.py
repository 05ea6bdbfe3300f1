"""Whether a new tensor of the calling thread is managed: scopes over the process-wide switch."""

from __future__ import annotations

from torch_uvm import _C
from torch_uvm._patches import install
from torch_uvm._residency import budget
from torch_uvm._util.arguments import exact_keywords
from torch_uvm._util.runtime import check_runtime
from torch_uvm._util.scopes import ReentrantScope


@exact_keywords
def is_enabled() -> bool:
    """Whether a tensor that this thread creates now would be managed.

    The thread's innermost scope decides; without a scope, the process-wide switch.
    """
    return _C.is_enabled()


class SwitchScope(ReentrantScope[_C.Scope]):
    """What `enabled()` and `disabled()` return: a context manager and a decorator.

    One object can be entered again while it is open, also by other threads; each entry is a scope of the
    thread that made it.
    """

    def __init__(self, on: bool, *allocator: _C.Allocator | None) -> None:
        super().__init__()
        self._on = on
        self._allocator_handle = allocator  # () keeps that of the scope around it; (None,): the process's own

    def _begin(self) -> _C.Scope:
        if self._on:
            check_runtime(repr(self))
            install.for_managed_tensors()
            budget.request_default()
        return _C.Scope(self._on, *self._allocator_handle)

    def _end(self, entry: _C.Scope) -> None:
        entry.close()
        if not _C.is_enabled():
            _C.flush_all_pending()

    def __repr__(self) -> str:
        return "torch_uvm.enabled()" if self._on else "torch_uvm.disabled()"


@exact_keywords
def enabled() -> SwitchScope:
    """A scope in which new tensors on the accelerator are managed.

    A context manager and a decorator. It holds for the thread that opens it and for the threads that run its
    backward, not for other threads. It takes no options: limit, budget and `moves` belong to the process,
    and are what `enable` set.

    >>> with torch_uvm.enabled():
    ...     x = torch.ones(4, device=torch.accelerator.current_accelerator())
    >>> @torch_uvm.enabled()
    ... def step(): ...
    """
    return SwitchScope(True)


@exact_keywords
def disabled() -> SwitchScope:
    """A scope in which new tensors get ordinary memory; otherwise like `enabled`."""
    return SwitchScope(False)
