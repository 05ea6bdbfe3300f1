"""Every collective that gloo supports, on a given device, compared with the same collective on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

RANKS = 2
COUNT = 70_000  # 273 KiB of float32: large enough for the residency engine


class Maker:
    """Makes a rank's tensors, the same ones on every device."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.generator = torch.Generator().manual_seed(7 + rank)

    def __call__(self, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.randint(1, 100, (count,), generator=self.generator)
        made = made.to(dtype) / 7 if dtype.is_floating_point else made.to(dtype)
        return made.to(self.device)

    def empty(self, count: int = COUNT) -> torch.Tensor:
        return torch.full((count,), -1.0, device=self.device)

    def list(self, *counts: int) -> list[torch.Tensor]:
        return [self(count) for count in counts or (COUNT, COUNT)]


Collective = Callable[[Maker], list[torch.Tensor]]
COLLECTIVES: dict[str, Collective] = {}


def collective(function: Collective) -> Collective:
    COLLECTIVES[function.__name__] = function
    return function


@collective
def reductions(make: Maker) -> list[torch.Tensor]:
    made = []
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
            made.append(make(1000, dtype))
            dist.all_reduce(made[-1], op)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        made.append(make(1000, torch.int32))
        dist.all_reduce(made[-1], op)
    made.append(make())
    dist.reduce(made[-1], dst=1)
    return made


@collective
def averages(make: Maker) -> list[torch.Tensor]:
    x = make()
    dist.all_reduce(x, ReduceOp.AVG)
    return [x]


@collective
def whole_reductions_at_once(make: Maker) -> list[torch.Tensor]:
    parts = make.list(COUNT, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        dist.all_reduce_coalesced(parts)
    return parts


@collective
def later(make: Maker) -> list[torch.Tensor]:
    """Several asynchronous collectives at once. A future's tensors are the tensors that were passed in."""
    made = make.list(COUNT, 10, COUNT)
    works = [dist.all_reduce(each, async_op=True) for each in made]
    futures = [work.get_future() for work in works]
    for each, work, future in zip(made, works, futures, strict=True):
        (found,) = future.wait()
        assert work is not None and work.wait() and work.is_completed() and work.is_success()
        assert found.device == each.device and found.data_ptr() == each.data_ptr()
    parts = [make.empty(), make.empty()]
    work = dist.all_gather(parts, made[0], async_op=True)
    found = work.get_future().then(lambda future: future.value()).wait()
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in parts]
    assert all(each.device == made[0].device for each in found)
    return [*made, *parts]


@collective
def queued_copies(make: Maker) -> list[torch.Tensor]:
    """The collective must wait for queued copies. With delayed schedules most of them have not started
    yet."""
    pinned = make(COUNT).cpu().pin_memory()
    made = []
    for _ in range(20):
        made.append(make.empty())
        made[-1].copy_(pinned, non_blocking=True)
        dist.all_reduce(made[-1])
    return made


@collective
def broadcasts(make: Maker) -> list[torch.Tensor]:
    made = [make(), make(COUNT, torch.uint8)]
    dist.broadcast(made[0], src=1)
    dist.broadcast(made[1], src=0)
    return made


@collective
def gathers(make: Maker) -> list[torch.Tensor]:
    x, whole = make(), make.empty(RANKS * COUNT)
    parts = [make.empty() for _ in range(RANKS)]
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole, x)
    there = [make.empty() for _ in range(RANKS)] if make.rank == 0 else None
    dist.gather(x, there, dst=0)
    return [x, whole, *parts, *(there or [])]


@collective
def gathers_of_several(make: Maker) -> list[torch.Tensor]:
    inputs = make.list(COUNT, 10)
    outputs = [[make.empty(COUNT), make.empty(10)] for _ in range(RANKS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        dist.all_gather_coalesced(outputs, inputs)
    return [*inputs, *outputs[0], *outputs[1]]


@collective
def scatters(make: Maker) -> list[torch.Tensor]:
    x, y, z = make.empty(), make.empty(), make.empty()
    dist.scatter(x, make.list() if make.rank == 1 else None, src=1)
    dist.reduce_scatter_tensor(y, make(RANKS * COUNT))
    dist.reduce_scatter(z, make.list(), ReduceOp.MAX)
    return [x, y, z]


@collective
def exchanges(make: Maker) -> list[torch.Tensor]:
    x, y = make.empty(), make.empty(20 if make.rank == 0 else 40)
    dist.all_to_all_single(x, make())
    splits = [10, 10] if make.rank == 0 else [20, 20]
    dist.all_to_all_single(y, make(30), splits, [10, 20])
    return [x, y]


@collective
def exchanges_of_lists(make: Maker) -> list[torch.Tensor]:
    parts = [make.empty(), make.empty()]
    dist.all_to_all(parts, make.list())
    return parts


@collective
def messages(make: Maker) -> list[torch.Tensor]:
    other = 1 - make.rank
    x, y, z, a = make(), make.empty(), make.empty(), make.empty()
    if make.rank == 0:
        dist.send(x, other)
        assert dist.recv(y) == other  # the rank of the sender
    else:
        dist.recv(y, other)
        dist.send(x, other)
    works = [dist.isend(x, other), dist.irecv(z, other)]
    works += dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, a, other)])
    for work in works:
        assert work is not None
        work.wait()
    return [x, y, z, a]


@collective
def objects(make: Maker) -> list[torch.Tensor]:
    x = make(10)
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, {"rank": make.rank, "x": x})
    assert [each["rank"] for each in found] == [0, 1] and all(each["x"].device == x.device for each in found)
    dist.barrier()
    dist.monitored_barrier()
    return [each["x"] for each in found]


@collective
def subgroups(make: Maker) -> list[torch.Tensor]:
    groups = [dist.new_group([rank]) for rank in range(RANKS)]
    both = dist.new_group([0, 1], backend="gloo")
    x, y = make(), make()
    dist.all_reduce(x, group=groups[make.rank])
    dist.all_reduce(y, group=both)
    dist.destroy_process_group(both)
    return [x, y]


@collective
def functional(make: Maker) -> list[torch.Tensor]:
    group = dist.group.WORLD
    x = make()
    return [
        all_reduce(x, "sum", group) + 0,  # type: ignore[arg-type]
        all_gather_tensor(x, 0, group) + 0,  # type: ignore[arg-type]
        reduce_scatter_tensor(x, "sum", 0, group) + 0,  # type: ignore[arg-type]
        all_to_all_single(x, None, None, group) + 0,  # type: ignore[arg-type]
    ]


@collective
def distributed_tensors(make: Maker) -> list[torch.Tensor]:
    mesh = init_device_mesh(make.device.type, (RANKS,))
    x, y = make(300 * 300).view(300, 300), make(300 * 300).view(300, 300)
    a, b = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(1)])
    product = a.redistribute(mesh, [Shard(1)]) @ b.redistribute(mesh, [Shard(0)])  # partial sums
    assert isinstance(product, DTensor) and isinstance(total := a.sum(), DTensor)
    return [product.full_tensor(), b.redistribute(mesh, [Replicate()]).to_local(), total.full_tensor()]


def outcome(name: str, rank: int, device: torch.device) -> list[torch.Tensor] | str:
    """The results of a collective on the CPU, or the error that it raised."""
    try:
        found = COLLECTIVES[name](Maker(rank, device))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__} {error}"
    assert all(each.device.type == device.type for each in found)
    return [each.cpu() for each in found]


def compare(name: str, rank: int, device: torch.device) -> str:
    """Raises if the device's outcome differs from the CPU's. Returns "equal", or the common error."""
    wanted, found = outcome(name, rank, torch.device("cpu")), outcome(name, rank, device)
    if isinstance(wanted, str) or isinstance(found, str):
        assert isinstance(wanted, str) and isinstance(found, str), (name, wanted, found)
        return wanted
    assert len(found) == len(wanted) > 0
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), (name, number)
    return "equal"
