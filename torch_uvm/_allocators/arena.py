"""Arenas: memory for an iteration, or for a part of one, that is released all at once."""

from __future__ import annotations

from typing import NamedTuple

from torch_uvm import _C
from torch_uvm._allocators.allocator import Allocator, ScopedAllocator, device_of, upstream_handle
from torch_uvm._util.arguments import Device, byte_count, exact_keywords


class Outlived(NamedTuple):
    """What was still in use when its memory was released: it keeps the memory until it is freed."""

    allocations: int
    bytes: int  #: as requested


class Arena(ScopedAllocator):
    """What `torch_uvm.allocators.arena` returns: an allocator, and a context manager that uses it.

    At the end of a `with` block, what was allocated in it is released. Blocks nest, and belong to one thread
    at a time; other threads take part with `use_allocator(arena)`. `outlived` is what was still in use at the
    last release.
    """

    handle: _C.Arena
    outlived = Outlived(0, 0)

    def _begin(self) -> None:
        self.handle.push()

    def _end(self) -> None:
        self.outlived = Outlived(*self.handle.pop())

    def reset(self) -> Outlived:
        """Releases everything: the next iteration begins. Open `with` blocks stay open.

        The arena keeps the memory. An iteration like the last one then takes nothing from the allocator
        below.
        """
        self.outlived = Outlived(*self.handle.reset())
        return self.outlived


@exact_keywords
def arena(
    initial: int | str = "64MiB", device: Device | None = None, *, upstream: Allocator | None = None
) -> Arena:
    """An arena: bump allocation in blocks of managed memory, released all at once.

    For memory that lives as long as an iteration. The second iteration takes nothing from the allocator
    below. Tensors that live on keep their block.

    Args:
        initial: bytes of a stream's first block in each scope, or a string such as "64MiB". Further blocks
            double the memory.
        device: the home of all that it allocates; None for the current accelerator. Within its scope,
            tensors of other devices get memory from the process's allocator.
        upstream: where its blocks come from; None for the process's allocator.

    Raises:
        TypeError, ValueError: a value that is not accepted.
        RuntimeError: there is no managed memory on this machine.

    >>> with torch_uvm.allocators.arena("1MiB") as scratch:
    ...     total = torch.ones(256, device=torch.accelerator.current_accelerator()).sum().item()
    >>> total, scratch.outlived.allocations
    (256.0, 0)
    """
    home = device_of(device, "arena()")
    return Arena(_C.Arena(upstream_handle(upstream, "arena()"), home, byte_count(initial, "initial")))
