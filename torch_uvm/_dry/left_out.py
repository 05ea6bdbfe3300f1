"""What scripts call and a dry run leaves out: files of tensors, a card's allocator, exchange between ranks,
compilation.

A dry run has none of the values that would be written, and each rank runs by itself.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import distributed

from torch_uvm._dry.values import StandIns
from torch_uvm._patches.import_hooks import when_imported

#: By module, functions and methods that do nothing. Trainers also delete older checkpoints.
_CALLS = {
    "torch": ("save",),
    "torch.cuda": ("ipc_collect", "memory_summary", "set_per_process_memory_fraction"),
    "torch.cuda.memory": ("_dump_snapshot", "_record_memory_history", "_snapshot"),
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


def leave_out(stand_ins: StandIns) -> None:
    """Replaces the functions, for the rest of the process."""
    for name in _CALLS:
        when_imported(name, lambda module: _replace(module, stand_ins))
    # DTensor would keep the states of its ranks' generators apart, in CUDA's form.
    when_imported("torch.distributed.tensor._random", _without_generators)
    _run_alone(stand_ins)
    _leave_out_compiler(stand_ins)


def _replace(module: ModuleType, stand_ins: StandIns) -> None:
    for path in _CALLS[module.__name__]:
        outer, _, name = path.rpartition(".")
        owner: Any = getattr(module, outer, None) if outer else module
        if callable(getattr(owner, name, None)):
            setattr(owner, name, _left_out(f"{module.__name__}.{path}", stand_ins))


def _left_out(name: str, stand_ins: StandIns) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        stand_ins.note(name, "nothing")

    return call


def _without_generators(module: Any) -> None:
    module.is_rng_supported_mesh = lambda mesh: False


def _run_alone(stand_ins: StandIns) -> None:
    """Replaces the making of process groups: none connects to other ranks, and collectives end at once."""
    if not distributed.is_available():
        return
    plain = distributed.init_process_group
    signature = inspect.signature(plain)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        given = signature.bind(*args, **kwargs).arguments
        size, mine = given.get("world_size", -1), given.get("rank", -1)
        size = size if size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        mine = mine if mine >= 0 else int(os.environ.get("RANK", "0"))
        stand_ins.note("process group", f"collectives of {size} ranks exchange nothing")
        plain("fake", world_size=size, rank=mine, store=FakeStore())

    distributed.init_process_group = init_process_group
    # DistributedDataParallel compares the ranks' parameters by collectives, and reads their results.
    parallel: Any = torch.nn.parallel.distributed
    parallel._verify_param_shape_across_processes = lambda *it, **_: None
    plain_init = parallel.DistributedDataParallel.__init__
    plain_hook = parallel.DistributedDataParallel.register_comm_hook

    @functools.wraps(plain_init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        plain_hook(self, None, _reduced)

    parallel.DistributedDataParallel.__init__ = initialise
    parallel.DistributedDataParallel.register_comm_hook = lambda *it, **_: None


def _reduced(state, bucket):  # type: ignore[no-untyped-def]
    """What the ranks' sum of gradients would be written to. DDP refuses annotations that are strings."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _leave_out_compiler(stand_ins: StandIns) -> None:
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        stand_ins.note("torch.compile", "eager")
        return model if model is not None else lambda it: it

    torch.compile = compile
