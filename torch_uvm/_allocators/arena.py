"""Arenas: memory for an iteration, or for a part of one, that is released all at once."""

from __future__ import annotations

import logging
from typing import NamedTuple

from torch_uvm import _C
from torch_uvm._allocators.allocator import Allocator, AllocatorScope, device_of, upstream_handle
from torch_uvm._util.arguments import Device, byte_count, exact_keywords, show

_log = logging.getLogger(__name__)


class Outlived(NamedTuple):
    """What was still in use when its memory was released: it keeps the memory until it is freed."""

    allocations: int
    bytes: int  #: as requested


class _Entry(NamedTuple):
    scope: AllocatorScope
    mark: int
    resets: int  # by then


class Arena(Allocator):
    """What `torch_uvm.arena` returns: an allocator, and a context manager that uses it.

    A `with` block opens a scope like `use_allocator` and pushes a mark; at its end, what was allocated in it
    is released. Blocks nest, and belong to one thread at a time; other threads take part with
    `use_allocator(arena)`. `outlived` is what was still in use at the last release.
    """

    handle: _C.Arena

    def __init__(self, handle: _C.Arena) -> None:
        super().__init__(handle)
        self.outlived = Outlived(0, 0)
        self._resets = 0
        self._entered: list[_Entry] = []

    def push(self) -> int:
        """Opens a scope within the open ones.

        Returns:
            the mark to pop.
        """
        return self.handle.push()

    @exact_keywords
    def pop(self, mark: int) -> Outlived:
        """Releases what was allocated since `push` returned `mark`.

        Args:
            mark: the innermost open mark.

        Raises:
            TypeError: not a mark.
            ValueError: it is not the innermost open mark; nothing has changed.
        """
        if not isinstance(mark, int) or mark < 0:
            raise TypeError(f"mark is {show(mark)}; accepted: what push() returned")
        return self._report("pop", Outlived(*self.handle.pop(mark)))

    def reset(self) -> Outlived:
        """Releases everything, open marks included: the next iteration begins.

        The arena keeps the memory, in one block for each stream. An iteration like the last one then takes
        nothing from the allocator below.
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
            self.reset()  # a reset dropped the mark: everything here is newer
            return
        self.pop(entry.mark)
        if not self._entered and self.stats()["allocations"] == 0:
            self.handle.reset()  # merges the blocks into one


@exact_keywords
def arena(
    initial: int | str = "64MiB",
    growth: float = 2.0,
    device: Device | None = None,
    *,
    upstream: Allocator | None = None,
) -> Arena:
    """An arena: bump allocation in blocks of managed memory, released all at once.

    For memory that lives as long as an iteration. An allocation takes some nanoseconds, a free less. The
    second iteration takes nothing from the allocator below. Tensors that live on keep their block.

    Args:
        initial: bytes of each stream's first block, or a string such as "64MiB".
        growth: the ratio of a stream's next block to the one before, at least 1; a reset merges the blocks.
        device: the home of all that it allocates; None for the current accelerator. Within its scope,
            tensors of other devices get memory from the process's allocator.
        upstream: where its blocks come from; None for the process's allocator.

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
