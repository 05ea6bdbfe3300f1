"""Calls that give addresses of managed memory to code outside PyTorch, under a budget.

Between operators the residency engine may move a storage's bytes to another address. The bytes must stay
at an address that has been given out:

- A bare address (`data_ptr()` of a tensor or a storage, numpy) is materialised first: the call waits for
  transfers, and the bytes stay until the next operator. It does not pin, because many programs use addresses
  as identities.
- A storage's `resize_` copies its bytes without an operator, and so does what reads and writes files for
  `pickle`. Each is one operator on the storage.
- An address that PyTorch keeps as an identity is replaced by the storage's, which does not move.
- Other methods of storages ask for the address and have no operator on a tensor of those bytes: deferred
  updates run first.
- An export (DLPack, `__cuda_array_interface__`) pins its storage on the device while the consumer may hold
  it.

The CPU's label of a moved tensor needs no pin: bytes with several labels are not moved.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary

from torch_uvm import _C
from torch_uvm._patches.replace import found, replace_once
from torch_uvm._util.compiler import run_as_it_is

_lock = threading.Lock()
#: Once the update was run, another thread's step may defer the next one before the address is read.
_TRIES = 8


@run_as_it_is
def _gives_out(x: torch.Tensor | torch.UntypedStorage) -> None:
    if isinstance(x, torch.UntypedStorage):
        if _C.label_count(x) > 0:
            _C.materialise_storage(x)
    elif _C.is_managed(x):
        _C.materialise(x)


def _materialising(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `plain`, a method of tensors or storages that returns an address."""

    @run_as_it_is
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for more_tries in reversed(range(_TRIES)):
            _gives_out(self)
            try:
                return plain(self, *args, **kwargs)
            except RuntimeError:
                if more_tries == 0 or not _C.pending_updates():
                    raise

    return call


def _flush(values: tuple[Any, ...]) -> None:
    if _C.pending_updates():
        for value in values:
            storage = value._untyped_storage if isinstance(value, torch.TypedStorage) else value
            if isinstance(storage, torch.UntypedStorage):
                _C.flush_pending_of_storage(storage)


def _flushing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `plain`, which PyTorch gives a storage's address although it is no operator on a tensor of it."""

    @run_as_it_is
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        _flush((*args, *kwargs.values()))
        return plain(*args, **kwargs)

    return call


def _copying(plain: Callable[..., Any], writes: bool = True) -> Callable[..., Any]:
    """Wraps `plain`, a method of storages that copies at their address: it is one operator on them."""
    code = _C.Unobserved(f"torch_uvm.{plain.__name__}", (), None if writes else frozenset(), None)

    @run_as_it_is
    @functools.wraps(plain)
    def call(self: torch.UntypedStorage, *args: Any) -> Any:
        _flush((self,))
        if self.nbytes() == 0 or args == (0,) or _C.label_count(self) == 0:  # nothing is copied to be empty
            return plain(self, *args)
        region = code.enter([torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)])
        try:
            return plain(self, *args)
        finally:
            if region is not None:
                _C.leave_region(region, None)

    return call


def _telling_apart(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `plain`, by which `allow_mutation_on_saved_tensors` finds tensors again, at their addresses."""

    @functools.wraps(plain)
    def call(tensor: torch.Tensor) -> Any:
        if not _C.is_managed(tensor):
            return plain(tensor)
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor._version)
        return place if plain.__name__ == "_get_sid" else (id(tensor), *place)

    return call


def _pin_while(lives: torch.Tensor, x: torch.Tensor) -> None:
    """Pins the bytes of `x` until `lives` is freed, in Python and in C++."""
    held = [x.detach()]  # an alias: the bytes of `x` may be replaced (`x.data = ...`)
    weakref.finalize(lives, _C.Pins(held).end).atexit = False


def exported(x: torch.Tensor) -> torch.Tensor:
    """The tensor to export in place of `x`: if need be an alias that pins the bytes of `x` while it lives."""
    if has_torch_function_unary(x):
        return x  # its class calls the export again
    if x.device.type == "cpu" or not _C.is_managed(x) or x.requires_grad:
        return x  # the engine does not move it; or PyTorch refuses to export it
    alias = x.detach()
    _pin_while(alias, x)
    return alias


def _exporting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(exported(tensor), *args, **kwargs)

    return call


#: By tensor, the storage that is pinned because of its `__cuda_array_interface__`.
_pinned_interfaces: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _array_interface(plain: Callable[[torch.Tensor], Any]) -> Any:
    @functools.wraps(plain)
    def interface(self: torch.Tensor) -> Any:
        given = plain(self)
        if has_torch_function_unary(self) or sys._getframe(2).f_code.co_filename == inspect.__file__:
            return given  # its class has called this again; or `inspect.getmembers` lists the attributes
        # A consumer keeps the tensor itself, so the pin lasts as long as the tensor. Many programs only
        # check whether the attribute exists.
        storage = self.untyped_storage()._cdata if _C.is_managed(self) else None
        with _lock:
            known = _pinned_interfaces.get(self) == storage
            if not known:
                _pinned_interfaces[self] = storage
        if not known:
            try:
                _pin_while(self, self)
            except BaseException:
                with _lock:
                    _pinned_interfaces.pop(self, None)
                raise
            given = plain(self)
        return given

    return interface


def pin_exports() -> None:
    """Replaces what exports bytes: an export from before the first budget outlives it. Once is enough."""
    replace_once(torch.Tensor, "__cuda_array_interface__", _array_interface)
    replace_once(torch, "to_dlpack", _exporting)
    # It exports in C, where no patch runs. A consumer that does not find it calls __dlpack__.
    owner: Any
    for owner in (torch.Tensor, getattr(torch.utils.dlpack, "ReadOnlyTensorWrapper", torch.Tensor)):
        if "__dlpack_c_exchange_api__" in vars(owner):
            del owner.__dlpack_c_exchange_api__


def watch() -> None:
    """Replaces what gives out bare addresses. Calling it again does nothing."""
    # Inside a compiled graph nothing is materialised: launchers of its kernels ask for every pointer, its
    # inputs are pinned, and Inductor says which ones it writes.
    if (method := found(torch.Tensor, "data_ptr")) is not None:
        _C.replace_data_ptr(method, _materialising)
    replace_once(torch.Tensor, "numpy", _materialising)
    replace_once(torch.UntypedStorage, "data_ptr", _materialising)
    replace_once(torch.UntypedStorage, "resize_", _copying)
    replace_once(torch.UntypedStorage, "_set_from_file", _copying)
    replace_once(torch.UntypedStorage, "_write_file", functools.partial(_copying, writes=False))
    for name in ("_get_sid", "_get_tid"):
        replace_once(torch.autograd.graph, name, _telling_apart)
    for name in ("copy_", "fill_", "is_pinned", "__getitem__", "__setitem__"):
        replace_once(torch.UntypedStorage, name, _flushing)
