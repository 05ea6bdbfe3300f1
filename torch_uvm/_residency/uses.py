"""Code that is no operator of PyTorch, and declares which tensors it uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import exact_keywords, show
from torch_uvm._util.compiler import break_the_graph
from torch_uvm._util.scopes import EagerScope

#: By which of the tensors are written. An operator is known by its name and its operands, and so is this.
_known: dict[frozenset[int], _C.Unobserved] = {}


def _end(entry: _C.DeclaredUse | None) -> None:
    if entry is not None:
        _C.leave_use(entry)


@exact_keywords
@break_the_graph
def uses(*tensors: torch.Tensor, writes: Iterable[torch.Tensor] | torch.Tensor | None = None) -> EagerScope:
    """Declares that the code within is one operator on these tensors.

    A context manager and a decorator, for calls of extensions that PyTorch's dispatcher does not see: those
    bound with pybind11, CuPy, ctypes. As before an operator, the tensors are brought to their device, or stay
    in pinned memory that it uses in place where there is no room; their addresses hold until the scope ends;
    they are fetched ahead once the loop repeats; what is written is copied out before it is evicted. All is
    in the order of the stream that is current on entry: kernels are to be queued there, and host code that
    reads or writes the bytes synchronises it first. An address that Python asks for (`data_ptr()`) counts as
    written, as everywhere. Without a budget it does nothing, nor for tensors that are not managed.

    Args:
        tensors: of any shape and device; what the code reads or writes.
        writes: a tensor or several, those that it writes; others may be given here alone. None: all.

    Raises:
        TypeError: an argument is no tensor.

    >>> x = torch_uvm.memory.ones(1 << 20)
    >>> y = torch_uvm.memory.zeros(1 << 20)
    >>> with torch_uvm.uses(x, y, writes=(y,)):
    ...     addresses = x.data_ptr(), y.data_ptr()
    """
    if not isinstance(writes, (Iterable, torch.Tensor, type(None))):
        raise TypeError(f"uses() takes writes=tensors; got {show(writes)}")
    written = tensors if writes is None else (writes,) if isinstance(writes, torch.Tensor) else tuple(writes)
    used = list({id(each): each for each in (*tensors, *written)}.values())
    for each in used:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"uses() takes tensors; got {show(each)}")
    names = set(map(id, written))
    places = frozenset([at for at, each in enumerate(used) if id(each) in names])
    if places not in _known:
        _known[places] = _C.Unobserved("torch_uvm.uses", (), places, None)
    code = _known[places]
    return EagerScope(f"torch_uvm.uses(... {len(used)} tensors)", lambda: code.use(used), _end)
