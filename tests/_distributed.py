"""What a rank of two does, on any accelerator: `python _two_ranks.py CASE,... DEVICE FOLDER` starts both.

On `emu` the groups talk through gloo, and a case compares with the CPU; on CUDA through NCCL, and it
compares with native memory, that is with torch_uvm off. Each rank has its own device, limit and budget.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _collectives import COLLECTIVES, compare
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_uvm

MIB = 1024**2
RANKS = 2
PATIENCE = datetime.timedelta(seconds=90)
LIMIT = 256 * MIB  # of each rank
WIDTH, LAYERS = 768, 6  # a layer has 2.25 MiB


@dataclass(frozen=True)
class Rank:
    rank: int
    device: torch.device
    plain: torch.device  # what is compared with: the CPU, or the same GPU without torch_uvm
    folder: Path

    @contextlib.contextmanager
    def budget(
        self, budget: int, optimizer: str = "in_place", *, moves: bool = True
    ) -> Iterator[dict[str, Any]]:
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
        for what in ("fetched", "written_back") if moves else ():
            assert figures[what]["bytes"] > 0, what
        assert figures["failures"] == 0
        if figures["over_budget"] == 0:
            assert figures["peak_device_bytes"][self.device] <= budget


Losses = list[float]
Contents = dict[str, torch.Tensor]
Train = Callable[[int, torch.device], tuple[Losses, Contents]]


def network() -> nn.Sequential:
    """The same on every rank and device: it is made on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 9))


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    device: torch.device,
    numbers: range,
    *,
    clip: bool = False,
) -> Losses:
    losses = []
    for number in numbers:
        torch.manual_seed(2 * number + rank)
        x, y = torch.randn(16, WIDTH).to(device), torch.randint(0, 9, (16,)).to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
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
    assert found[1].keys() == wanted[1].keys() and len(wanted[1]) >= 2 * LAYERS
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


@cache
def plain(train: Train, rank: Rank) -> tuple[Losses, Contents]:
    """Without torch_uvm. On a GPU two runs have to be equal, so that equality with a third says something."""
    first = train(rank.rank, rank.plain)
    if rank.plain.type != "cpu":
        assert_equal(train(rank.rank, rank.plain), first)
    return first


# --- DistributedDataParallel


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
        with rank.budget(32 * MIB):  # parameters, gradients and moments have 54, buckets 14
            found = train(rank.rank, rank.device)
        assert_equal(found, plain(train, rank))


def ddp_hook(rank: Rank) -> None:
    """Gradients travel in half precision; the hook is Python's, and goes on with what a future gives."""
    train = partial(data_parallel, hook=fp16_compress_hook)
    with rank.budget(32 * MIB):
        found = train(rank.rank, rank.device)
    assert_equal(found, plain(train, rank))


def ddp_deferred(rank: Rank) -> None:
    with rank.budget(32 * MIB, "deferred"):
        found = data_parallel(rank.rank, rank.device, deferred=True)
    assert_equal(found, plain(data_parallel, rank))


# --- FSDP2


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


SHARDS = 20 * MIB  # of shards, their gradients and moments there are 27


def fsdp(rank: Rank) -> None:
    with rank.budget(SHARDS):
        found = fully_sharded(rank.rank, rank.device)
    assert_equal(found, plain(fully_sharded, rank))


def fsdp_options(rank: Rank) -> None:
    """Parameters in bfloat16 that stay whole until backward is through; gradients clipped over all shards."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train = partial(fully_sharded, clip=True, mp_policy=half, reshard_after_forward=False)
    with rank.budget(SHARDS):
        found = train(rank.rank, rank.device)
    assert_equal(found, plain(train, rank))


def fsdp_deferred(rank: Rank) -> None:
    """Its parameters are DTensors, of which no step is deferred: that changes nothing."""
    with rank.budget(SHARDS, "deferred"):
        found = fully_sharded(rank.rank, rank.device)
    assert_equal(found, plain(fully_sharded, rank))


PARTS = ("model_state_dict", "optim_state_dict")


def fsdp_checkpoint(rank: Rank) -> None:
    """Written by both ranks after two steps, and read into a new model, which goes on as the old one."""
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


# --- tensor parallel


def split_over_ranks(rank: int, device: torch.device) -> tuple[Losses, Contents]:
    mesh = init_device_mesh(device.type, (RANKS,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(4):
        torch.manual_seed(number)  # all ranks see the same
        loss = model(torch.randn(16, WIDTH).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, contents(model, optimizer)


def tensor_parallel(rank: Rank) -> None:
    with rank.budget(24 * MIB):  # of 36
        found = split_over_ranks(rank.rank, rank.device)
    assert_equal(found, plain(split_over_ranks, rank))


# --- collectives


def collectives(rank: Rank) -> None:
    """Each against the CPU's, plain and managed; the first line that fails says which."""
    for managed in (False, True):
        with torch_uvm.enabled() if managed else torch_uvm.disabled():
            for name in COLLECTIVES:
                assert compare(name, rank.rank, rank.device) == "equal", name


def backends(rank: Rank) -> None:
    """However the group was made, it serves the accelerator and the CPU."""
    kind = rank.device.type
    store = FileStore(str(rank.folder / "backends"), RANKS)
    for number, backend in enumerate((None, "gloo", f"{kind}:gloo", f"cpu:gloo,{kind}:gloo")):
        dist.destroy_process_group()
        of_this = PrefixStore(f"{number}", store)
        dist.init_process_group(backend, store=of_this, rank=rank.rank, world_size=RANKS, timeout=PATIENCE)
        for device in (rank.device, torch.device("cpu")):
            x = torch.full((4,), rank.rank + 1.0, device=device)
            dist.all_reduce(x)
            assert x.tolist() == [3.0] * 4 and x.device == device


def filled(value: float, rank: Rank) -> torch.Tensor:
    return torch.full((MIB // 4,), value, device=rank.device)  # 1 MiB


def push_out(rank: Rank) -> None:
    """Uses so much memory that whatever may leave a device with a budget of 8 MiB leaves it."""
    others = [filled(1.0, rank) for _ in range(10)]
    for other in others:
        other.add_(1)


def written(rank: Rank) -> None:
    """What a collective has written is not what the host has a copy of, though no schema says so."""

    def kept(tensors: list[torch.Tensor], call: Callable[[], object], values: list[float]) -> None:
        push_out(rank)
        for each in tensors:
            each.sum().item()  # from here on the host and the device have it
        call()
        push_out(rank)
        assert [each.mean().item() for each in tensors] == values

    with rank.budget(8 * MIB):
        x = filled(rank.rank + 1.0, rank)
        kept([x], lambda: dist.all_reduce(x), [3.0])
        parts = [filled(-1.0, rank), filled(-1.0, rank)]
        kept(parts, lambda: dist.all_gather(parts, x), [3.0, 3.0])
        x.fill_(rank.rank + 1.0)
        kept([x], lambda: dist.broadcast(x, src=1), [2.0])


def under_way(rank: Rank) -> None:
    """A collective's tensors stay where they are until it is done, and stay alive."""
    store = dist.distributed_c10d._get_default_store()
    with rank.budget(8 * MIB, moves=False):
        x, y = filled(rank.rank + 1.0, rank), filled(rank.rank + 1.0, rank)
        halves = filled(rank.rank + 1.0, rank)
        half = halves[: MIB // 8]
        if rank.rank == 1:
            store.wait(["rank 0 has made others take all memory"])
        works = [dist.all_reduce(each, async_op=True) for each in (x, y, half)]
        if rank.rank == 0:
            del y
            halves[MIB // 8 :].add_(1)  # an operator may use the rest meanwhile
            push_out(rank)
            assert torch_uvm.emulated.residency(x) == {rank.device: x.nbytes}
            assert torch_uvm.emulated.residency(halves) == {rank.device: halves.nbytes}
            assert not any(work is None or work.is_completed() for work in works)
            store.set("rank 0 has made others take all memory", "")
        for work in works:
            assert work is not None
            work.wait()
        assert x.mean().item() == 3.0 and half.mean().item() == 3.0
        if rank.rank == 1:
            assert y.mean().item() == 3.0


def larger_than_the_budget(rank: Rank) -> None:
    with rank.budget(2 * MIB, moves=False) as figures:
        x = torch.full((MIB,), rank.rank + 1.0, device=rank.device)
        dist.all_reduce(x)
        whole = torch.zeros(2 * MIB, device=rank.device)
        dist.all_gather_into_tensor(whole, x)
        assert x.mean().item() == 3.0 and whole.mean().item() == 3.0
    assert figures["over_budget"] > 0


def lost(rank: Rank) -> None:
    """Waiting ends: with the time given, and when the other rank has gone. The last case of a group."""
    store = dist.distributed_c10d._get_default_store()
    if rank.rank == 1:
        store.wait(["rank 0 has waited"])
        os._exit(0)
    x = filled(1.0, rank)
    group_work = dist.all_reduce(x, async_op=True)
    assert group_work is not None
    try:
        group_work.wait(datetime.timedelta(seconds=1))
    except RuntimeError as error:
        assert "imed out" in str(error), error
    else:
        raise AssertionError("nobody answered, and it was done")
    store.set("rank 0 has waited", "")
    try:
        dist.all_reduce(x)
    except RuntimeError:
        print("done lost", flush=True)
        os._exit(0)  # there is nobody to take leave of
    raise AssertionError("the other rank had gone, and it was done")


CASES: dict[str, Callable[[Rank], None]] = {
    case.__name__: case
    for case in (
        ddp, ddp_hook, ddp_deferred, fsdp, fsdp_options, fsdp_deferred, fsdp_checkpoint, tensor_parallel,
        collectives, backends, written, under_way, larger_than_the_budget, lost,
    )
}  # fmt: skip


def main(number: int, names: list[str], kind: str, folder: Path) -> None:
    assert torch_uvm._C.get_limit() == LIMIT, "set in the environment, before anything could be allocated"
    torch.set_num_threads(1)
    if kind == "cuda":
        device = native = torch.device(kind, number)
    else:
        device, native = torch.device(kind, 0), torch.device("cpu")
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=number,
        world_size=RANKS,
        timeout=PATIENCE,
    )
    rank = Rank(number, device, native, folder)
    for name in names:
        CASES[name](rank)
        gc.collect()
        dist.barrier()
        if number == 0:
            print("done", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], Path(sys.argv[4]))
