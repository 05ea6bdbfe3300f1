"""Tensors whose sizes follow from stand-ins, and how much of the peak they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from torch_uvm._allocators.statistics import memory_allocated

Key = tuple[str, str]  # of `StandIns`
_Keys = frozenset[Key]
_SIZED = "_torch_uvm_sized"  # an attribute of storages
_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))


class _Mark:
    """Counts a storage's bytes for as long as the storage has this attribute."""

    def __init__(self, live: Counter[_Keys], keys: _Keys, bytes: int) -> None:
        self.keys = keys
        self._live, self._bytes = live, bytes
        live[keys] += bytes

    def __del__(self) -> None:
        self._live[self.keys] -= self._bytes


class Sizes:
    """Follows sizes from the stand-ins that decide them to the tensors that have them.

    A new tensor has the size of an operand if it has at least as many elements, and a multiple of its rows:
    the dimension with the largest stride. That is no proof, and errs towards more.
    """

    def __init__(self) -> None:
        self._at_peak: dict[_Keys, int] = {}
        self._most = 0  # bytes allocated at the most, while there are such tensors
        self._live: Counter[_Keys] = Counter()
        self._told: dict[int, Key] = {}  # sizes that the script may have read

    def begin(self, key: Key, results: Iterable[Tensor]) -> None:
        """The stand-in decided the sizes of these results."""
        for it in results:
            self._mark(it, frozenset([key]))
            if it.dim():
                self.tell(key, it.size(0))

    def tell(self, key: Key, number: int) -> None:
        """The script may make tensors of this size."""
        if number > 1:
            self._told.setdefault(number, key)

    def follow(self, operator: str, results: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
        """An operator made these results."""
        if not self._told:
            return
        sized = [it for it in operands if hasattr(it.untyped_storage(), _SIZED)]
        others = {it.shape for it in operands if not hasattr(it.untyped_storage(), _SIZED)}
        for new in results:
            keys: set[Key] = set()
            if not operands:
                keys.update(self._told[size] for size in new.shape if size in self._told)
            elif operator in _PRODUCTS or new.shape not in others:
                for it in sized:
                    if _passes(operator, it, operands, new):
                        keys |= getattr(it.untyped_storage(), _SIZED).keys
            if keys:
                self._mark(new, frozenset(keys))
        if results and not results[0].is_cpu and any(self._live.values()):
            allocated = memory_allocated(results[0].device)
            if allocated > self._most:
                self._most = allocated
                self._at_peak = {keys: bytes for keys, bytes in self._live.items() if bytes}

    def at_peak_of(self, key: Key | None) -> int:
        """Bytes that tensors whose size follows from this stand-in, or from any, had at their peak."""
        return sum(bytes for keys, bytes in self._at_peak.items() if key is None or key in keys)

    def _mark(self, tensor: Tensor, keys: _Keys) -> None:
        storage = tensor.untyped_storage()
        if not hasattr(storage, _SIZED):
            setattr(storage, _SIZED, _Mark(self._live, keys, 0 if tensor.is_cpu else storage.nbytes()))


def _passes(operator: str, operand: Tensor, operands: Sequence[Tensor], new: Tensor) -> bool:
    """Whether a new tensor has the rows of an operand."""
    if operand.dim() == 0:
        return False
    outer = max(range(operand.dim()), key=operand.stride)
    if operator in _PRODUCTS:
        contracted = operand.dim() - (1 if operand is operands[-2] else 2)
        return outer != contracted
    return new.numel() >= operand.numel() and new.numel() % max(operand.size(outer), 1) == 0
