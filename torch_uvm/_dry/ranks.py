"""Ranks of torch.distributed: each runs dry by itself, and its collectives exchange nothing."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import distributed

from torch_uvm._dry.values import StandIns


def run_alone(stand_ins: StandIns) -> None:
    """Replaces the making of process groups: none connects to other ranks, and collectives end at once."""
    if not distributed.is_available():
        return
    plain = distributed.init_process_group

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        mine = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
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
