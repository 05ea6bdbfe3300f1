"""Allocators of managed memory that a program can make, nest, and use for some of its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_uvm import _C
from torch_uvm._switch.switch import switch_scope
from torch_uvm._util.arguments import (
    Device,
    accelerator,
    byte_count,
    exact_keywords,
    limit_bytes,
    resolve_device,
    show,
)
from torch_uvm._util.runtime import check_runtime
from torch_uvm._util.scopes import ReentrantScope

if TYPE_CHECKING:
    from typing_extensions import Self


def upstream_handle(upstream: Allocator | None, what: str) -> _C.Allocator:
    """The allocator to take memory from: `upstream`, or the process's caching allocator."""
    return _C.process_allocator() if upstream is None else _checked(upstream, f"{what} upstream").handle


def device_of(device: Device | None, what: str) -> torch.device:
    """The home to allocate for; None for the current accelerator."""
    check_runtime(what, now=True)
    return resolve_device(accelerator() if device is None else device)


def _checked(allocator: Any, what: str) -> Allocator:
    if not isinstance(allocator, Allocator):
        raise TypeError(f"{what} is {show(allocator)}; accepted: a torch_uvm.allocators.Allocator, or None")
    return allocator


class Allocator:
    """An allocator of managed memory: made by its class methods, nested by its `with_` methods.

    `use_allocator`, or `torch_uvm.memory.empty(..., allocator=...)` and its namesakes, use it. A tensor keeps
    its allocator and its memory as long as it lives. Thread-safe.

    >>> pool = torch_uvm.allocators.Allocator.pool("1MiB", maximum="4MiB").with_statistics()
    >>> with torch_uvm.allocators.use_allocator(pool):
    ...     x = torch.ones(1024, device=torch.accelerator.current_accelerator())
    >>> pool.stats()["requested_bytes"]
    4096
    """

    def __init__(self, handle: _C.Allocator) -> None:
        if not isinstance(handle, _C.Allocator):
            raise TypeError(
                "Allocator() makes none; accepted: Allocator.process(), .caching(), .pool(), "
                "torch_uvm.allocators.arena(), torch_uvm.allocators.allocation_plan()"
            )
        self.handle = handle

    @classmethod
    @exact_keywords
    def process(cls) -> Allocator:
        """The process's caching allocator, which all managed memory comes from."""
        check_runtime("Allocator.process()", now=True)
        return Allocator(_C.process_allocator())

    @classmethod
    @exact_keywords
    def caching(cls, *, upstream: Allocator | None = None) -> Allocator:
        """A caching allocator with a cache of its own: a pool without bounds, on `upstream`."""
        return Allocator.pool(upstream=upstream)

    @classmethod
    @exact_keywords
    def pool(
        cls,
        initial: int | str = 0,
        *,
        maximum: int | str | None = None,
        device: Device | None = None,
        upstream: Allocator | None = None,
    ) -> Allocator:
        """A caching allocator that reserves `initial` bytes at once, and at most `maximum`.

        Args:
            initial, maximum: bytes, or a string such as "64MiB"; `maximum` None for no bound of its own.
            device: the home of the initial bytes; None for the current accelerator.
            upstream: where its segments come from; None for the process's allocator.

        Raises:
            TypeError, ValueError: a value that is not accepted; `initial` is more than `maximum`.
            RuntimeError: there is no managed memory on this machine.
            torch.OutOfMemoryError: `initial` bytes are not available.
        """
        first, most = byte_count(initial, "initial"), limit_bytes(maximum, "maximum")
        home = device_of(device, "Allocator.pool()")
        return Allocator(_C.caching_allocator(upstream_handle(upstream, "Allocator"), home, first, most))

    @exact_keywords
    def with_limit(self, limit: int | str) -> Allocator:
        """An allocator on this one that has at most `limit` requested bytes in use.

        Beyond that it raises torch.OutOfMemoryError.
        """
        return Allocator(_C.Adaptor(self.handle, limit=byte_count(limit, "limit")))

    @exact_keywords
    def with_statistics(self) -> CountingAllocator:
        """An allocator on this one that counts the requests made through it."""
        return CountingAllocator(_C.Adaptor(self.handle))

    @exact_keywords
    def with_failure_callback(self, callback: Callable[[int, torch.device], bool]) -> Allocator:
        """An allocator on this one that calls `callback` before torch.OutOfMemoryError is raised.

        Args:
            callback: called with the requested bytes and their device; returns whether to retry, and is
                called again until it returns False. The thread that allocates calls it, possibly in the
                middle of an operator, and gets the exceptions that it raises.
        """
        if not callable(callback):
            raise TypeError(f"callback is {show(callback)}; accepted: a function of bytes and device")

        def ask(count: int, home: int) -> bool:
            here = accelerator()
            place = torch.device("cpu") if home < 0 or here is None else torch.device(here.type, home)
            return bool(callback(count, place))

        return Allocator(_C.Adaptor(self.handle, callback=ask))

    @exact_keywords
    def with_log(self, path: str | os.PathLike[str]) -> LoggingAllocator:
        """An allocator on this one that logs its allocations and frees, in the columns of RMM's logs.

        Raises:
            ValueError: the file cannot be created.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path is {show(path)}; accepted: a string or a path")
        return LoggingAllocator(_C.Adaptor(self.handle, log=os.path.abspath(path)))

    def stats(self) -> dict[str, int]:
        """What it has now, and has done since it was made.

        `allocations` in use and their `requested_bytes`, `reserved_bytes` taken from its upstream, the peaks
        of both, the `upstream_allocations` and `upstream_frees` that it made, and `events_recorded`.
        """
        return self.handle.figures()

    def release(self) -> int:
        """Releases to its upstream the memory that no tensor uses. Returns the bytes released."""
        return self.handle.release()

    def __repr__(self) -> str:
        return f"torch_uvm.allocators.Allocator({self.handle.description()})"


class CountingAllocator(Allocator):
    """What `Allocator.with_statistics` returns."""

    handle: _C.Adaptor

    def passed(self) -> dict[str, int]:
        """Its requests: `allocations` and `bytes` in use, their `peak_` and `total_`, and `failures`."""
        return self.handle.passed()

    def reset_peaks(self) -> None:
        """Sets both peaks to the current values."""
        self.handle.reset_peaks()


class LoggingAllocator(Allocator):
    """What `Allocator.with_log` returns."""

    handle: _C.Adaptor

    def close(self) -> int:
        """Completes the file; later allocations are not logged. Returns the rows in the file.

        Raises:
            RuntimeError: the file could not be written; it ends with a whole row.
        """
        rows, _, error = self.handle.close_log()
        if error:
            raise RuntimeError(error)
        return rows


class ScopedAllocator(Allocator):
    """An allocator that is also a context manager: in a `with` block, new tensors come from it."""

    def __init__(self, handle: _C.Allocator) -> None:
        super().__init__(handle)
        self._open: list[ReentrantScope] = []

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._begin()
        try:
            self._open.append(use_allocator(self).__enter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if not self._open:
            raise RuntimeError(f"{self!r} is left, but not open")
        self._open.pop().__exit__(*error)
        self._end()


@exact_keywords
def use_allocator(allocator: Allocator | None) -> ReentrantScope:
    """A scope in which new tensors on the accelerator are managed, with memory from `allocator`.

    A context manager and a decorator, as `torch_uvm.enabled()` is. It holds for the thread that opens it and
    for the threads that run its backward. Tensors of a home that the allocator does not serve (an arena
    serves one device) get memory from the process's allocator.

    Args:
        allocator: None for the process's own, within another such scope.

    Raises:
        TypeError: `allocator` is something else.
        RuntimeError: there is no managed memory on this machine (on entry).
    """
    handle = None if allocator is None else _checked(allocator, "allocator").handle
    return switch_scope(f"torch_uvm.allocators.use_allocator({allocator!r})", True, handle)


def made_by(allocator: Any, device: torch.device, what: str) -> ReentrantScope | None:
    """The scope in which a factory makes a tensor for `allocator`; None if `allocator` is None."""
    if allocator is None:
        return None
    if not _checked(allocator, f"{what}() allocator").handle.serves(device):
        raise ValueError(f"{what}() on {device}, which {allocator!r} does not serve")
    return use_allocator(allocator)
