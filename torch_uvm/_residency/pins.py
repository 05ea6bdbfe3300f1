"""Tensors that stay on their device whatever the residency engine would do with them."""

from __future__ import annotations

import threading

import torch

from torch_uvm import _C
from torch_uvm._residency.hints import Hinted
from torch_uvm._util.arguments import exact_keywords
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.containers import managed_tensors_in
from torch_uvm._util.scopes import ReentrantScope


def _has_budget(device: torch.device) -> bool:
    return device.type != "cpu" and _C.budget(device.index) is not None


class Kept:
    """What `keep_resident` returns: `release()` ends it. It keeps the tensors' bytes alive."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # Without a budget nothing is held, and nothing may be released later. Not the tensors themselves: the
        # bytes of a parameter may be exchanged meanwhile.
        self._tensors = [t.detach() for t in tensors if _has_budget(t.device)]
        self._lock = threading.Lock()
        _C.keep_resident(self._tensors, True)

    def release(self) -> None:
        """Lets the engine move the tensors again, unless others hold them. Doing it again does nothing."""
        with self._lock:
            tensors, self._tensors = self._tensors, []
        _C.keep_resident(tensors, False)

    def __repr__(self) -> str:
        return f"<torch_uvm.keep_resident of {len(self._tensors)} tensors>"


@exact_keywords
@break_the_graph
def keep_resident(x: Hinted) -> Kept:
    """Brings managed tensors to their device and keeps them there until that is undone.

    Where there is no budget nothing is done: say it after `enable` and `set_budget`. For tensors whose
    address is kept by code that PyTorch does not run, and for what must never be late. They count towards
    the budget: what is kept is missing elsewhere. Holds nest. Tensors that are not managed, and those
    labelled as the CPU's, are passed over, unless `x` is one that is not managed.

    Args:
        x: a tensor of any shape, a module (its parameters and buffers), an optimizer (the tensors of its
            state now), or nested lists, tuples and mappings of them.

    Returns:
        an object whose `release()` undoes it. Who drops it keeps the tensors resident until they are freed.

    Raises:
        TypeError: something in `x` is none of the above, and its place is named.
        ValueError: `x` is a tensor that is not managed.
        torch.OutOfMemoryError: they do not fit. Nothing is kept then.

    >>> table = torch_uvm.zeros(1 << 20)
    >>> kept = torch_uvm.keep_resident(table)
    >>> kept.release()
    """
    return Kept(managed_tensors_in(x, "keep_resident"))


class ResidentScope(ReentrantScope[Kept]):
    """What `resident` returns. It can be entered again while it is open, also by other threads."""

    def __init__(self, x: Hinted) -> None:
        super().__init__()
        self._x = x

    def _begin(self) -> Kept:
        return Kept(managed_tensors_in(self._x, "resident"))  # as they are now: a module's may have changed

    def _end(self, entry: Kept) -> None:
        entry.release()

    @break_the_graph
    def __enter__(self) -> ResidentScope:
        return super().__enter__()

    @break_the_graph
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)

    def __repr__(self) -> str:
        return "torch_uvm.resident(...)"


@exact_keywords
@break_the_graph
def resident(x: Hinted) -> ResidentScope:
    """A scope in which managed tensors are on their device and stay there, as `keep_resident` has it.

    A context manager and a decorator. Inside, `data_ptr()` of the tensors stays good. Scopes nest, in one
    thread and between threads; leaving one by an exception releases, too.

    Args:
        x: as `keep_resident` takes it; looked through each time the scope is entered.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError: as `keep_resident`; the first two also when `x` is
            handed in, not when the scope is entered.

    >>> weights = torch_uvm.ones(1 << 20)
    >>> with torch_uvm.resident(weights):
    ...     address = weights.data_ptr()
    """
    managed_tensors_in(x, "resident")
    return ResidentScope(x)
