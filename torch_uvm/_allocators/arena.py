"""Arenas: memory for an iteration, or for a scope within one, that is given up all at once."""

from __future__ import annotations

import logging
from typing import NamedTuple

from torch_uvm import _C
from torch_uvm._allocators.allocator import Allocator, AllocatorScope, device_of, upstream_handle
from torch_uvm._util.arguments import Device, byte_count, exact_keywords, show

_log = logging.getLogger(__name__)


class Outlived(NamedTuple):
    """What was in use when its memory was given up: it keeps that, which comes back when it goes."""

    allocations: int
    bytes: int  #: as asked for


class _Entry(NamedTuple):
    scope: AllocatorScope
    mark: int
    resets: int  # by then


class Arena(Allocator):
    """What `torch_uvm.arena` returns: an allocator, and a context manager in which new tensors come from it.

    A `with` block is a scope as `use_allocator` opens one, and a mark: what was allocated in it is given up
    at its end. They nest, and are one thread's at a time; others join in by `use_allocator(arena)`.
    `outlived` says what was still in use when memory was given up last.
    """

    handle: _C.Arena

    def __init__(self, handle: _C.Arena) -> None:
        super().__init__(handle)
        self.outlived = Outlived(0, 0)
        self._resets = 0
        self._entered: list[_Entry] = []

    def push(self) -> int:
        """Begins a scope within those that are open.

        Returns:
            the mark to pop.
        """
        return self.handle.push()

    @exact_keywords
    def pop(self, mark: int) -> Outlived:
        """Gives up what was allocated since `push` returned `mark`.

        Args:
            mark: the innermost one that is open.

        Raises:
            TypeError: `mark` is none.
            ValueError: it is not the innermost open mark; nothing has changed.
        """
        if not isinstance(mark, int) or mark < 0:
            raise TypeError(f"mark is {show(mark)}; accepted: what push() returned")
        return self._report("pop", Outlived(*self.handle.pop(mark)))

    def reset(self) -> Outlived:
        """Gives up everything, open marks included: the next iteration begins.

        Its memory stays with it, in one block for each stream: an iteration like the last one asks nobody.
        """
        self._resets += 1
        return self._report("reset", Outlived(*self.handle.reset()))

    def _report(self, what: str, outlived: Outlived) -> Outlived:
        self.outlived = outlived
        if outlived.allocations:
            _log.info("%s %s: %d tensors with %d bytes are still in use", repr(self), what, *outlived)
        return outlived

    def __enter__(self) -> Arena:
        scope = AllocatorScope(self)
        scope.__enter__()
        self._entered.append(_Entry(scope, self.push(), self._resets))
        return self

    def __exit__(self, *error: object) -> None:
        if not self._entered:
            raise RuntimeError(f"{self!r} is left, but not open")
        entry = self._entered.pop()
        entry.scope.__exit__(*error)
        if entry.resets != self._resets:
            self.reset()  # the mark is gone: all that there is came after it
            return
        self.pop(entry.mark)
        if not self._entered and self.stats()["allocations"] == 0:
            self.handle.reset()  # the next time it is one block


@exact_keywords
def arena(
    initial: int | str = "64MiB",
    growth: float = 2.0,
    device: Device | None = None,
    *,
    upstream: Allocator | None = None,
) -> Arena:
    """An arena: bump allocation in blocks of managed memory, given up all at once.

    For memory that lives as long as an iteration. An allocation takes some nanoseconds, a free less, and the
    second iteration asks the allocator below for nothing. Tensors that live on keep their block alive.

    Args:
        initial: bytes of the first block of each stream, or a string such as "64MiB".
        growth: how many times as large the next block of a stream is, until a reset makes one of them; at
            least 1.
        device: the home of all that it allocates; None for the current accelerator. Within its scope, tensors
            of other devices get their memory from the process's own allocator.
        upstream: where its blocks come from; None for the process's own allocator.

    Raises:
        TypeError, ValueError: a value that is not accepted.
        RuntimeError: there is no managed memory on this machine.

    >>> with torch_uvm.arena("1MiB") as scratch:
    ...     total = torch.ones(256, device=torch.accelerator.current_accelerator()).sum().item()
    >>> total, scratch.outlived.allocations
    (256.0, 0)
    """
    what = "arena()"
    if isinstance(growth, bool) or not isinstance(growth, (int, float)):
        raise TypeError(f"growth is {show(growth)}; accepted: a number of at least 1")
    home = device_of(device, what)
    handle = _C.Arena(upstream_handle(upstream, what), home, byte_count(initial, "initial"), float(growth))
    return Arena(handle)
