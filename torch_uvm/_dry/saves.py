"""Files that a script would write tensors into: a dry run has none of their values, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_uvm._dry.values import StandIns
from torch_uvm._patches.import_hooks import when_imported

#: By module, functions and methods that write tensors. Trainers also delete older checkpoints.
_WRITERS = {
    "torch": ("save",),
    "torch.jit": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.trainer": ("Trainer._save_checkpoint", "Trainer.save_model"),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model"),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "numpy": ("save", "savez", "savez_compressed"),
}


def leave_out_saves(stand_ins: StandIns) -> None:
    """Replaces the functions that write tensors into files, also in modules that are imported later."""
    for name in _WRITERS:
        when_imported(name, lambda module: _replace(module, stand_ins))


def _replace(module: ModuleType, stand_ins: StandIns) -> None:
    for path in _WRITERS[module.__name__]:
        outer, _, name = path.rpartition(".")
        owner: Any = getattr(module, outer, None) if outer else module
        if callable(getattr(owner, name, None)):
            setattr(owner, name, _left_out(f"{module.__name__}.{path}", stand_ins))


def _left_out(name: str, stand_ins: StandIns) -> Callable[..., None]:
    def save(*args: Any, **kwargs: Any) -> None:
        stand_ins.note(name, "nothing is written")

    return save
