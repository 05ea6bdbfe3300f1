"""Cases of two ranks on any accelerator: `python _two_ranks.py CASE,... DEVICE FOLDER` starts both ranks.

On `emu` the groups use gloo, and a case compares with the CPU. On CUDA they use NCCL, and a case compares
with native memory, that is with torch_uvm off. Each rank has its own device, limit and budget.
"""

from __future__ import annotations

import datetime
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _collectives import COLLECTIVES, compare
from _data_parallel import (
    ddp,
    ddp_deferred,
    ddp_hook,
    fsdp,
    fsdp_checkpoint,
    fsdp_deferred,
    fsdp_options,
    tensor_parallel,
)
from _ranks import LIMIT, MIB, PATIENCE, RANKS, Rank
from torch._C._distributed_c10d import FileStore, PrefixStore

import torch_uvm

# Gloo refuses them before torch 2.13, on each device.
OF_NEWER_TORCH = {"exchanges_of_lists"} if torch.__version__ < "2.13" else set()


def collectives(rank: Rank) -> None:
    """Compares each collective with the CPU's, for plain and for managed memory."""
    for managed in (False, True):
        with torch_uvm.enabled() if managed else torch_uvm.disabled():
            for name in COLLECTIVES:
                equal = compare(name, rank.rank, rank.device) == "equal"
                assert equal or name in OF_NEWER_TORCH, name


def backends(rank: Rank) -> None:
    """A group of each backend serves the accelerator and the CPU."""
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
    """Uses more memory than a device's budget of 8 MiB, so that every movable storage is evicted."""
    others = [filled(1.0, rank) for _ in range(10)]
    for other in others:
        other.add_(1)


def written(rank: Rank) -> None:
    """A collective's writes make older host copies stale, although no schema declares them."""

    def kept(tensors: list[torch.Tensor], call: Callable[[], object], values: list[float]) -> None:
        push_out(rank)
        for each in tensors:
            each.sum().item()  # from here on the host has a clean copy
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
    """A collective's tensors stay in place and alive until it is done."""
    store = dist.distributed_c10d._get_default_store()
    with rank.budget(8 * MIB, moves=False):
        x, y = filled(rank.rank + 1.0, rank), filled(rank.rank + 1.0, rank)
        halves = filled(rank.rank + 1.0, rank)
        half = halves[: MIB // 8]
        # Connects the ranks, for which NCCL takes seconds. Loads kernels: CUDA loads none while one waits.
        dist.all_reduce(half.clone().add_(0))
        push_out(rank)
        torch.accelerator.synchronize()
        if rank.rank == 1 and rank.device.type == "cuda":
            torch.cuda._sleep(int(4e9))  # some seconds; the other rank's kernels wait meanwhile
        elif rank.rank == 1:
            store.wait(["rank 0 has made others take all memory"])
        works = [dist.all_reduce(each, async_op=True) for each in (x, y, half)]
        if rank.rank == 0:
            del y
            halves[MIB // 8 :].add_(1)  # an operator may use the rest meanwhile
            push_out(rank)
            for each in (x, halves):
                assert torch_uvm.residency(each) == {rank.device: each.nbytes}
            assert not any(work is None or work.is_completed() for work in works)
            store.set("rank 0 has made others take all memory", "")
        for work in works:
            assert work is not None
            work.wait()
        assert x.mean().item() == 3.0 and half.mean().item() == 3.0
        if rank.rank == 1:
            assert y.mean().item() == 3.0
        push_out(rank)
        assert torch_uvm.residency(halves) == {torch.device("cpu"): halves.nbytes}  # it may move again


def under_way_before_a_budget(rank: Rank) -> None:
    """So do those of one that began before the process's first budget. The first case of a group."""
    store = dist.distributed_c10d._get_default_store()
    torch_uvm.enable(budget=None)
    halves = torch.full((2 * MIB,), rank.rank + 1.0, device=rank.device)
    if rank.rank == 1:
        store.wait(["rank 0 has set a budget"])
    work = dist.all_reduce(halves[:MIB], async_op=True)
    assert work is not None
    if rank.rank == 0:
        torch_uvm.set_budget(12 * MIB)
        for _ in range(3):
            halves[MIB:].add_(1)
            push_out(rank)
        store.set("rank 0 has set a budget", "")
    work.wait()
    assert halves[:MIB].mean().item() == 3.0
    assert halves[MIB:].mean().item() == (4.0 if rank.rank == 0 else 2.0)
    torch_uvm.disable()
    torch_uvm.set_budget(None)


def under_way_as_it_wakes(rank: Rank) -> None:
    """So do those of a collective that began while the engine was idle."""
    store = dist.distributed_c10d._get_default_store()
    with rank.budget(32 * MIB, moves=False):
        x, *others = [filled(rank.rank + 1.0, rank) for _ in range(11)]
        for _ in range(1000):  # until the engine is idle
            for each in (x, *others):
                each.mul_(1)
            torch_uvm.step()
        if rank.rank == 1:
            store.wait(["rank 0 has filled its budget"])
        work = dist.all_reduce(x, async_op=True)
        if rank.rank == 0:
            more = [filled(1.0, rank) for _ in range(60)]
            for each in more:
                each.add_(1)
            assert torch_uvm.residency(x) == {rank.device: x.nbytes}
            store.set("rank 0 has filled its budget", "")
        assert work is not None
        work.wait()
        assert x.mean().item() == 3.0


def larger_than_the_budget(rank: Rank) -> None:
    with rank.budget(2 * MIB, moves=False) as figures:
        x = torch.full((MIB,), rank.rank + 1.0, device=rank.device)
        dist.all_reduce(x)
        whole = torch.zeros(2 * MIB, device=rank.device)
        dist.all_gather_into_tensor(whole, x)
        assert x.mean().item() == 3.0 and whole.mean().item() == 3.0
    assert figures["over_budget"] > 0


def lost(rank: Rank) -> None:
    """A wait ends after its timeout, and when the other rank has exited. The last case of a group."""
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
        raise AssertionError("the other rank did not take part, and it was done")
    store.set("rank 0 has waited", "")
    try:
        dist.all_reduce(x)
    except RuntimeError:
        print("done lost", flush=True)
        os._exit(0)  # no rank is left to synchronise with
    raise AssertionError("the other rank had gone, and it was done")


CASES: dict[str, Callable[[Rank], None]] = {
    case.__name__: case
    for case in (
        under_way_before_a_budget,
        ddp, ddp_hook, ddp_deferred, fsdp, fsdp_options, fsdp_deferred, fsdp_checkpoint, tensor_parallel,
        collectives, backends, written, under_way, under_way_as_it_wakes, larger_than_the_budget, lost,
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
