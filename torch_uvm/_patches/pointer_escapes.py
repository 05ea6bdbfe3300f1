"""Where addresses of managed memory leave PyTorch, under a budget.

The residency engine changes where a storage's bytes are between operators. Whoever is given an address
must find the bytes there:

- a bare one (`data_ptr()`, of a tensor or a storage; numpy) is settled before it is given: transfers are
  waited for, and the bytes stay until the next operator. Too many programs take addresses for identities
  to hold a storage for ever because of one.
- an export (DLPack, `__cuda_array_interface__`) holds its storage on the device as long as somebody
  may have it.

What the CPU's label of a moved tensor gives out needs no hold: bytes with several labels are not moved.
Nothing here is in place before there is a budget; afterwards it stays.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary

from torch_uvm import _C
from torch_uvm._patches.replace import replace_once
from torch_uvm._util.compiler import run_as_it_is

_lock = threading.Lock()
_watching = False


def _settling(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, a method of tensors that gives out an address."""

    @run_as_it_is
    @functools.wraps(plain)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.is_managed(self):
            _C.settle(self)
        return plain(self, *args, **kwargs)

    return call


def _settling_storage(plain: Callable[..., Any]) -> Callable[..., Any]:
    @run_as_it_is
    @functools.wraps(plain)
    def call(self: torch.UntypedStorage) -> Any:
        if _C.label_count(self) > 0:
            _C.settle_storage(self)
        return plain(self)

    return call


def _hold_while(lives: torch.Tensor, x: torch.Tensor) -> None:
    """Keeps the bytes of `x` where they are until `lives` is gone, in Python and in C++."""
    held = [x.detach()]  # not `x`, whose bytes may be exchanged (`x.data = ...`)
    _C.keep_resident(held, True)
    weakref.finalize(lives, _C.keep_resident, held, False).atexit = False


def exported(x: torch.Tensor) -> torch.Tensor:
    """What to export in place of `x`, which may be any tensor: it holds its bytes until it is gone."""
    if not _watching or not _C.is_managed(x):
        return x
    if x.device.type == "cpu" or _C.budget(x.device.index) is None:
        return x  # not the engine's to move
    if has_torch_function_unary(x):
        _hold_while(x, x)
        return x
    if x.requires_grad:
        return x  # not to be exported, as PyTorch says
    alias = x.detach()
    _hold_while(alias, x)
    return alias


def _exporting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(exported(tensor), *args, **kwargs)

    return call


#: By tensor, the storage that is held because of its `__cuda_array_interface__`.
_held_interfaces: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _array_interface(plain: property) -> property:
    get: Any = plain.fget

    @functools.wraps(get)
    def interface(self: torch.Tensor) -> Any:
        given = get(self)
        # The protocol has whoever reads it keep the tensor, and many only look whether it is there.
        storage = self.untyped_storage()._cdata if _C.is_managed(self) else None
        with _lock:
            known = _held_interfaces.get(self) == storage
            if not known:
                _held_interfaces[self] = storage
        if not known:
            try:
                _hold_while(self, self)
            except BaseException:
                with _lock:
                    _held_interfaces.pop(self, None)
                raise
            given = get(self)
        return given

    return property(interface)


def watch() -> None:
    """Puts all this in place. Calling it again does nothing."""
    global _watching
    with _lock:
        if _watching:
            return
        tensor: Any = torch.Tensor
        storage: Any = torch.UntypedStorage
        for name in ("data_ptr", "numpy"):
            replace_once(tensor, name, _settling)
        replace_once(storage, "data_ptr", _settling_storage)
        replace_once(tensor, "__cuda_array_interface__", _array_interface)
        for module in (torch, torch.utils.dlpack):
            replace_once(module, "to_dlpack", _exporting)
        # Exports in C that nobody sees; who finds it missing calls __dlpack__.
        if "__dlpack_c_exchange_api__" in vars(tensor):
            del tensor.__dlpack_c_exchange_api__
        _watching = True
