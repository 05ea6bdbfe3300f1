"""What two ranks do, on any accelerator: `python _distributed.py CASE DEVICE STORE` starts both.

On `emu` the groups talk through gloo, and a case compares with the CPU; on CUDA through NCCL, and it
compares with native memory, that is with torch_uvm off. Each rank has its own device, limit and budget.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import torch_uvm

MIB = 1024**2
RANKS = 2
PATIENCE = datetime.timedelta(seconds=40)
LIMIT = 256 * MIB  # of each rank
WIDTH, LAYERS = 768, 6  # a layer has 2.25 MiB


@dataclass
class Rank:
    rank: int
    device: torch.device
    plain: torch.device  # what is compared with: the CPU, or the same GPU without torch_uvm
    folder: Path

    @contextlib.contextmanager
    def budget(self, budget: int, optimizer: str = "in_place") -> Iterator[dict[str, Any]]:
        """Managed memory within `budget`, too little for all at once; the figures afterwards."""
        figures: dict[str, Any] = {}
        gc.collect()
        torch_uvm.empty_cache()
        torch_uvm.reset_peak_memory_stats()
        torch_uvm.enable(budget=budget, optimizer=optimizer)
        torch_uvm.reset_residency_stats()
        try:
            yield figures
            torch.accelerator.synchronize()
            figures |= torch_uvm.residency_stats()
        finally:
            torch_uvm.disable()
            gc.collect()
            torch_uvm.set_budget(None)
            torch_uvm.enable(budget=None, optimizer="in_place")
            torch_uvm.disable()
        for what in ("fetched", "written_back"):
            assert figures[what]["bytes"] > 0, what
        assert figures["failures"] == 0
        if figures["over_budget"] == 0:
            assert figures["peak_device_bytes"][self.device] <= budget


Losses = list[float]
Contents = dict[str, torch.Tensor]


def network() -> nn.Sequential:
    """The same on every rank and device: it is made on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 9))


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device, numbers: range
) -> Losses:
    losses = []
    for number in numbers:
        torch.manual_seed(2 * number + rank)
        x, y = torch.randn(16, WIDTH).to(device), torch.randint(0, 9, (16,)).to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU; of a DTensor all of it, from all ranks."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contents:
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    found |= {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": whole(value) for name, value in state.items() if torch.is_tensor(value)}
    return found


def assert_equal(found: tuple[Losses, Contents], wanted: tuple[Losses, Contents]) -> None:
    assert found[0] == wanted[0], (found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys() and len(wanted[1]) > 2 * LAYERS
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


def plain_twice(train: Callable[[], tuple[Losses, Contents]]) -> tuple[Losses, Contents]:
    """Of two runs that have to be equal, so that equality with a third says something."""
    first = train()
    assert_equal(train(), first)
    return first


# --- DistributedDataParallel


def data_parallel(
    rank: int, device: torch.device, *, deferred: bool = False, **options: Any
) -> tuple[Losses, Contents]:
    layers = network().to(device)
    model = DistributedDataParallel(
        layers, device_ids=[rank] if device.type == "cuda" else None, bucket_cap_mb=5, **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = steps(model, optimizer, rank, device, range(4))
    assert (torch_uvm._C.pending_updates() > 0) == deferred
    return losses, contents(layers, optimizer)


def ddp(rank: Rank) -> None:
    for views in (False, True):
        train = partial(data_parallel, rank.rank, gradient_as_bucket_view=views)
        wanted = plain_twice(partial(train, rank.plain))
        with rank.budget(32 * MIB):  # parameters, gradients and moments have 54, buckets 14
            found = train(rank.device)
        assert_equal(found, wanted)


def ddp_deferred(rank: Rank) -> None:
    wanted = plain_twice(lambda: data_parallel(rank.rank, rank.plain))
    with rank.budget(32 * MIB, "deferred"):
        found = data_parallel(rank.rank, rank.device, deferred=True)
    assert_equal(found, wanted)


# --- FSDP2


def sharded(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh(device.type, (RANKS,))
    model = network().to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def fully_sharded(rank: int, device: torch.device) -> tuple[Losses, Contents]:
    model, optimizer = sharded(device)
    return steps(model, optimizer, rank, device, range(4)), contents(model, optimizer)


SHARDS = 20 * MIB  # of shards, their gradients and moments there are 27


def fsdp(rank: Rank) -> None:
    wanted = plain_twice(lambda: fully_sharded(rank.rank, rank.plain))
    with rank.budget(SHARDS):
        found = fully_sharded(rank.rank, rank.device)
    assert_equal(found, wanted)


def fsdp_deferred(rank: Rank) -> None:
    """Its parameters are DTensors, of which no step is deferred: that changes nothing."""
    wanted = plain_twice(lambda: fully_sharded(rank.rank, rank.plain))
    with rank.budget(SHARDS, "deferred"):
        found = fully_sharded(rank.rank, rank.device)
    assert_equal(found, wanted)


PARTS = ("model_state_dict", "optim_state_dict")


def fsdp_checkpoint(rank: Rank) -> None:
    """Written by both ranks after two steps, and read into a new model, which goes on as the old one."""
    wanted = plain_twice(lambda: fully_sharded(rank.rank, rank.plain))
    with rank.budget(SHARDS):
        model, optimizer = sharded(rank.device)
        losses = steps(model, optimizer, rank.rank, rank.device, range(2))
        parts = dict(zip(PARTS, get_state_dict(model, optimizer), strict=True))
        save(parts, checkpoint_id=rank.folder / "checkpoint")
        del parts

        model, optimizer = sharded(rank.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        read: dict[str, Any] = dict(zip(PARTS, get_state_dict(model, optimizer), strict=True))
        load(read, checkpoint_id=rank.folder / "checkpoint")
        set_state_dict(model, optimizer, **read)
        del read
        losses += steps(model, optimizer, rank.rank, rank.device, range(2, 4))
        found = losses, contents(model, optimizer)
    assert_equal(found, wanted)


CASES: dict[str, Callable[[Rank], None]] = {
    case.__name__: case for case in (ddp, ddp_deferred, fsdp, fsdp_deferred, fsdp_checkpoint)
}


def work(number: int, names: str, kind: str, store: str) -> None:
    torch.set_num_threads(1)
    assert torch_uvm._C.get_limit() == LIMIT, "set in the environment, before anything could be allocated"
    if kind == "cuda":
        device = plain = torch.device(kind, number)
    else:
        device, plain = torch.device(kind, 0), torch.device("cpu")
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else None,
        init_method=f"file://{store}",
        rank=number,
        world_size=RANKS,
        timeout=PATIENCE,
    )
    try:
        for name in names.split(","):
            CASES[name](Rank(number, device, plain, Path(store).parent))
            gc.collect()
            dist.barrier()
            if number == 0:
                print("done", name, flush=True)
    finally:
        dist.destroy_process_group()


def main(names: str, kind: str, store: str) -> None:
    spawn(work, args=(names, kind, store), nprocs=RANKS)


if __name__ == "__main__":
    main(*sys.argv[1:])
