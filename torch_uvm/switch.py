"""The switch: whether new tensors on the accelerator get managed memory."""

from __future__ import annotations

import inspect
import threading
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from torch_uvm import _C
from torch_uvm.arguments import byte_count, exact_keywords, limit_bytes, show

_BUDGETS = '"auto" or None'


def _check_budget(budget: object) -> None:
    if budget is None or (isinstance(budget, str) and budget == "auto"):
        return
    byte_count(budget, "budget", also=', "auto" or None')  # a figure that is none is refused as such
    raise NotImplementedError(f"budget={budget!r} is not there yet; accepted: {_BUDGETS}")


def _check_moves(moves: object) -> None:
    if not isinstance(moves, str):
        raise TypeError(f'moves is {show(moves)}; accepted: "copy"')
    if moves == "alias":
        raise NotImplementedError('moves="alias" is not there yet; accepted: "copy"')
    if moves != "copy":
        raise ValueError(f'moves={moves!r}; accepted: "copy" ("alias" is known, and not there yet)')


def _check_host_tensors(host_tensors: object) -> None:
    if not isinstance(host_tensors, bool):
        raise TypeError(f"host_tensors is {show(host_tensors)}; accepted: False")
    if host_tensors:
        raise NotImplementedError("host_tensors=True is not there yet; accepted: False")


def _check_runtime(what: str) -> None:
    if _C.backend() == "none":
        raise RuntimeError(
            f"{what}: there is no managed memory for this machine's accelerator; "
            "set TORCH_UVM_DEVICE=emu to use the emulated one"
        )


@exact_keywords
def enable(
    *,
    budget: int | str | None = "auto",
    limit: int | str | None = None,
    moves: str = "copy",
    host_tensors: bool = False,
) -> None:
    """Turns managed memory on for the process: new tensors on the accelerator are managed.

    May be called at any time; tensors made before stay what they are. A scope that is open on the
    calling thread (`enabled`, `disabled`) goes on to say what holds inside it.

    Args:
        budget: how much of a device to use for managed memory. "auto" and None both leave that to
            the driver until the residency engine is there.
        limit: the most managed bytes the process may reserve, as `set_limit` takes it. None leaves
            the limit as it is, so that one set before, or by TORCH_UVM_CONF, is not lost;
            `set_limit(None)` takes it away.
        moves: what `.to` and its kin do: "copy", as in PyTorch.
        host_tensors: whether CPU tensors are managed, too: False.

    Raises:
        TypeError, ValueError: a keyword or value that is not accepted. Nothing has changed.
        NotImplementedError: a budget in bytes, moves="alias", host_tensors=True.
        RuntimeError: there is no runtime for this machine's accelerator.

    >>> torch_uvm.enable(limit="4GiB")
    """
    _check_budget(budget)
    _check_moves(moves)
    _check_host_tensors(host_tensors)
    figure = limit_bytes(limit)
    _check_runtime("enable()")
    if figure is not None:
        _C.set_limit(figure)
    _C.set_enabled(True)


@exact_keywords
def disable() -> None:
    """Turns managed memory off for the process: new tensors get ordinary memory again.

    Managed tensors stay managed, and usable, until they are freed. The limit stays.
    """
    _C.set_enabled(False)


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
            _check_runtime("enabled()")
        entry = threading.get_ident(), _C.Scope(self._on)
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
