"""Pins: tensors that the residency engine keeps on their device."""

from __future__ import annotations

import threading

import torch

from torch_uvm import _C
from torch_uvm._residency.hints import Hinted
from torch_uvm._util.arguments import exact_keywords
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.containers import managed_tensors_in
from torch_uvm._util.scopes import EagerScope


def _to_pin(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # Without a budget nothing is pinned, so nothing may be unpinned later. Aliases, not the tensors
    # themselves: the bytes of a parameter may be replaced meanwhile (`p.data = ...`).
    return [t.detach() for t in tensors if t.device.type != "cpu" and _C.budget(t.device.index) is not None]


class Kept:
    """What `keep_resident` returns: `release()` unpins. It keeps the tensors' bytes alive."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = _to_pin(tensors)
        self._lock = threading.Lock()
        _C.keep_resident(self._tensors, True)

    def release(self) -> None:
        """Lets the engine move the tensors again, unless another pin holds them.

        A second call does nothing.
        """
        with self._lock:
            tensors, self._tensors = self._tensors, []
        _C.keep_resident(tensors, False)

    def __repr__(self) -> str:
        return f"<torch_uvm.keep_resident of {len(self._tensors)} tensors>"


@exact_keywords
@break_the_graph
def keep_resident(x: Hinted) -> Kept:
    """Brings managed tensors to their device and pins them there until `release()`.

    For tensors whose address is kept by code that PyTorch does not run, and for tensors whose use must never
    wait for a fetch. Pinned bytes count towards the budget. Pins nest. Without a budget it does nothing:
    call it after `enable` and `set_budget`. Tensors labelled as the CPU's are skipped; otherwise `x` and
    errors are as those of `prefetch`.

    Returns:
        an object whose `release()` unpins. If it is dropped, the tensors stay pinned until they are freed.

    Raises:
        torch.OutOfMemoryError: they do not fit, nor after 30 s of waiting for operators of other threads that
            have their room. Nothing is pinned then.

    >>> table = torch_uvm.memory.zeros(1 << 20)
    >>> kept = torch_uvm.keep_resident(table)
    >>> kept.release()
    """
    return Kept(managed_tensors_in(x, "keep_resident"))


@exact_keywords
@break_the_graph
def resident(x: Hinted) -> EagerScope:
    """A scope in which managed tensors are pinned on their device, as `keep_resident` does it.

    A context manager and a decorator, which can be entered again while it is open. Inside, `data_ptr()` of
    the tensors stays valid. Scopes nest, in one thread and between threads; leaving one by an exception
    unpins, too.

    Args:
        x: as for `keep_resident`; its tensors are collected each time the scope is entered.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError: as `keep_resident`. The first two are raised by the
            call, too, not only on entry.

    >>> weights = torch_uvm.memory.ones(1 << 20)
    >>> with torch_uvm.resident(weights):
    ...     address = weights.data_ptr()
    """
    managed_tensors_in(x, "resident")

    def begin() -> _C.Pins:
        return _C.Pins(_to_pin(managed_tensors_in(x, "resident")))  # a module's tensors may have changed

    return EagerScope("torch_uvm.resident(...)", begin, _C.Pins.end)
