"""Tensors sent to other processes, through torch.multiprocessing and `share_memory_()`.

PyTorch shares CPU memory by replacing a storage's memory with shared memory. For a managed storage that
would take the bytes away from every other label, silently. So a copy in shared memory is sent, made when the
message is pickled; the sender's tensor is unchanged. Memory of the emulated accelerator, and managed memory
on a GPU, have no handle that another process could open. They are sent in the same way, and the receiver
allocates its own memory on the device.
"""

from __future__ import annotations

import multiprocessing.context
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_tensor

from torch_uvm import _C
from torch_uvm._patches.replace import replace_once

# Arguments of a new process: their shared memory must stay open until the process has started.
_held_for_children: weakref.WeakKeyDictionary[Any, list[torch.UntypedStorage]] = weakref.WeakKeyDictionary()


def _in_shared_memory(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.nbytes() == 0:
        return torch.UntypedStorage(0)
    staged: torch.UntypedStorage = torch.UntypedStorage._new_shared(storage.nbytes())
    staged.copy_(storage, non_blocking=False)
    child: Any = multiprocessing.context.get_spawning_popen()
    if child is not None:
        _held_for_children.setdefault(child, []).append(staged)
    return staged


def _on_device(staged: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    """The receiver's part: new memory on `device`, managed if the receiver's switch is on."""
    _C.start_device(torch.device(device))
    storage = torch.UntypedStorage(staged.nbytes(), device=device)
    storage.copy_(staged, non_blocking=False)
    return storage


def _copying(plain: Callable[[Any], Any]) -> Callable[[torch.UntypedStorage], Any]:
    def reduce(storage: torch.UntypedStorage) -> Any:
        # A pickler reduces each storage once, so views of one storage are views of one copy.
        managed_on_gpu = storage.device.type == "cuda" and _C.label_count(storage) > 0
        if storage.device.type == "emu" or managed_on_gpu:
            return _on_device, (_in_shared_memory(storage), str(storage.device))
        if storage.device.type == "cpu" and _C.label_count(storage) > 0:
            return plain(_in_shared_memory(storage))
        return plain(storage)

    return reduce


def _without_handle(plain: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
    def reduce(tensor: torch.Tensor) -> Any:
        # For a tensor on a GPU, PyTorch sends a CUDA handle, which managed memory does not have. Send its
        # storage, as for a tensor on the CPU. PyTorch itself refuses what autograd cannot send.
        carried = tensor.is_leaf or not tensor.requires_grad
        if tensor.device.type != "cuda" or not carried or not _C.is_managed(tensor):
            return plain(tensor)
        named: Any = tensor  # torch's stubs forget has_names
        if named.has_names():
            return plain(tensor)
        torch.utils.hooks.warn_if_has_hooks(tensor)
        described = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.requires_grad
        return rebuild_tensor, (type(tensor), tensor._typed_storage(), described)

    return reduce


def _refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def share(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        labels = _C.label_count(self) if self.device.type == "cpu" else 0
        if labels > 1:
            raise RuntimeError(
                f"sharing managed memory that carries {labels} labels with other processes would take the "
                f"bytes away from the others; share a copy: t.to('cpu', managed=False).share_memory_()"
            )
        return plain(self, *args, **kwargs)

    share.__name__ = plain.__name__
    return share


def send_copies() -> None:
    """Registers how managed tensors, and those of the emulated accelerator, are pickled for other processes.

    Calling it again does nothing.
    """
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    if reducers[torch.UntypedStorage].__module__ == __name__:
        return
    for kind in (torch.Tensor, torch.nn.Parameter):
        if reducers[kind].__module__ != __name__:
            ForkingPickler.register(kind, _without_handle(reducers[kind]))
    ForkingPickler.register(torch.UntypedStorage, _copying(reducers[torch.UntypedStorage]))


def refuse_shared_labels() -> None:
    """Makes `share_memory_()` refuse bytes with several labels. Calling it again does nothing."""
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        replace_once(torch.UntypedStorage, name, _refusing)
