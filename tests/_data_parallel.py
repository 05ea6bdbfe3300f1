"""Cases of two ranks: DistributedDataParallel, FSDP2 and tensor parallelism under a budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _ranks import MIB, RANKS, WIDTH, Contents, Losses, Rank, assert_equal, contents, network, plain, steps
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_uvm


def data_parallel(
    rank: int, device: torch.device, *, deferred: bool = False, hook: Any = None, **options: Any
) -> tuple[Losses, Contents]:
    layers = network().to(device)
    model = DistributedDataParallel(
        layers, device_ids=[rank] if device.type == "cuda" else None, bucket_cap_mb=5, **options
    )
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = steps(model, optimizer, rank, device, range(4))
    assert (torch_uvm._C.pending_updates() > 0) == deferred
    return losses, contents(layers, optimizer)


def ddp(rank: Rank) -> None:
    for views in (False, True):
        train = partial(data_parallel, gradient_as_bucket_view=views)
        with rank.budget(32 * MIB):  # parameters, gradients and moments are 54 MiB, buckets 14
            found = train(rank.rank, rank.device)
        assert_equal(found, plain(train, rank))


def ddp_hook(rank: Rank) -> None:
    """Gradients are sent in half precision by a Python hook that continues with a future's result."""
    train = partial(data_parallel, hook=fp16_compress_hook)
    with rank.budget(32 * MIB):
        found = train(rank.rank, rank.device)
    assert_equal(found, plain(train, rank))


def ddp_deferred(rank: Rank) -> None:
    with rank.budget(32 * MIB, "deferred"):
        found = data_parallel(rank.rank, rank.device, deferred=True)
    assert_equal(found, plain(data_parallel, rank))


def sharded(device: torch.device, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh(device.type, (RANKS,))
    model = network().to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def fully_sharded(
    rank: int, device: torch.device, *, clip: bool = False, **options: Any
) -> tuple[Losses, Contents]:
    model, optimizer = sharded(device, **options)
    losses = steps(model, optimizer, rank, device, range(4), clip=clip)
    return losses, contents(model, optimizer)


SHARDS = 20 * MIB  # shards, their gradients and moments are 27 MiB


def fsdp(rank: Rank) -> None:
    with rank.budget(SHARDS) as figures:
        found = fully_sharded(rank.rank, rank.device)
    assert_equal(found, plain(fully_sharded, rank))
    assert figures["over_budget"] == 0  # a gathered gradient moves as soon as its collective is done


def fsdp_options(rank: Rank) -> None:
    """Parameters in bfloat16 that stay unsharded until backward ends; gradients clipped over all shards."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train = partial(fully_sharded, clip=True, mp_policy=half, reshard_after_forward=False)
    with rank.budget(SHARDS):
        found = train(rank.rank, rank.device)
    assert_equal(found, plain(train, rank))


def fsdp_deferred(rank: Rank) -> None:
    """The parameters are DTensors, whose steps are never deferred, so the option has no effect."""
    with rank.budget(SHARDS, "deferred"):
        found = fully_sharded(rank.rank, rank.device)
    assert_equal(found, plain(fully_sharded, rank))


PARTS = ("model_state_dict", "optim_state_dict")


def fsdp_checkpoint(rank: Rank) -> None:
    """Both ranks write a checkpoint after two steps. A new model reads it and continues like the old one."""
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
    assert_equal(found, plain(fully_sharded, rank))


def split_over_ranks(rank: int, device: torch.device) -> tuple[Losses, Contents]:
    mesh = init_device_mesh(device.type, (RANKS,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(4):
        torch.manual_seed(number)  # all ranks use the same batches
        loss = model(torch.randn(16, WIDTH).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, contents(model, optimizer)


def tensor_parallel(rank: Rank) -> None:
    with rank.budget(24 * MIB):  # the peak is 36 MiB
        found = split_over_ranks(rank.rank, rank.device)
    assert_equal(found, plain(split_over_ranks, rank))
