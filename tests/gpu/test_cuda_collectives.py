"""NCCL with managed tensors on two GPUs, one process each. Results equal those with native tensors."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _spawn import Spawn

pytestmark = [
    pytest.mark.usefixtures("two_devices"),
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL"),
    pytest.mark.timeout(120),
]

TESTS = str(Path(__file__).resolve().parents[1])
LIMIT = "256MiB"  # per rank
RANKS = """
import datetime, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COUNT = 1 << 20


def work(rank, tests, store):
    sys.path.insert(0, tests)
    from _cuda import is_managed_by_cuda
    import torch_uvm

    assert torch_uvm._C.get_limit() == 256 << 20
    torch.cuda.set_device(rank)
    where, patience = f"file://{store}", datetime.timedelta(seconds=40)
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=2, timeout=patience)
    try:
        body(rank, torch.device("cuda", rank), torch_uvm, is_managed_by_cuda)
        torch.cuda.synchronize()
        assert torch_uvm._C.peak_managed_bytes() > 0
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=tuple(sys.argv[1:]), nprocs=2)
"""


@pytest.fixture
def two_ranks(spawn: Spawn, tmp_path: Path) -> Callable[[str], None]:
    def run(body: str) -> None:
        head, main = RANKS.split("\n\nif __name__")
        body = textwrap.indent(textwrap.dedent(body), "    ")
        script = tmp_path / "ranks.py"
        script.write_text(
            f"{head}\n\ndef body(rank, device, torch_uvm, is_managed_by_cuda):\n{body}\n\nif __name__{main}"
        )
        # NVLink multicast belongs to the whole host, whose other GPUs may have other users.
        environment = {"TORCH_UVM_CONF": f"limit:{LIMIT}", "NCCL_NVLS_ENABLE": "0"}
        spawn(args=[str(script), TESTS, str(tmp_path / "store")], env=environment, timeout=110)

    return run


Ranks = Callable[[str], None]


def test_collectives(two_ranks: Ranks) -> None:
    two_ranks(
        """
        torch_uvm.enable()
        make = lambda value, count=COUNT: torch.full((count,), float(value), device=device)
        x = make(rank + 1)
        assert is_managed_by_cuda(x)
        dist.all_reduce(x)
        assert x.sum().item() == 3 * COUNT

        parts = [make(0), make(0)]
        dist.all_gather(parts, make(rank + 1))
        assert [part.sum().item() for part in parts] == [COUNT, 2 * COUNT]
        whole = make(0, 2 * COUNT)
        dist.all_gather_into_tensor(whole, make(rank + 1))
        assert whole[:COUNT].sum().item() == COUNT and whole[COUNT:].sum().item() == 2 * COUNT

        x = make(rank + 5)
        dist.broadcast(x, src=1)
        assert x.sum().item() == 6 * COUNT

        part = make(0)
        dist.reduce_scatter_tensor(part, torch.cat([make(rank + 1), make(10 * (rank + 1))]))
        assert part.sum().item() == (3 if rank == 0 else 30) * COUNT

        there = make(0)
        dist.all_to_all_single(there, make(rank + 1))
        assert there[: COUNT // 2].sum().item() == COUNT // 2 and there[COUNT // 2 :].sum().item() == COUNT

        x = make(rank + 1)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        assert x.sum().item() == COUNT
        assert all(map(is_managed_by_cuda, [*parts, whole, part, there, x]))

        native = torch_uvm.to(make(rank + 1), device, managed=False)
        assert not is_managed_by_cuda(native)
        dist.all_reduce(native)
        assert native.sum().item() == 3 * COUNT, "the other kind beside it"
        """
    )


def test_moves_hints_and_frees_during_a_collective(two_ranks: Ranks) -> None:
    two_ranks(
        """
        torch_uvm.enable()
        for turn in range(5):
            # Its own memory is freed before the collective has started, and other tensors are allocated.
            x = torch.full((COUNT,), rank + turn + 1.0, device=device)
            torch.cuda._sleep(20_000_000)
            work = dist.all_reduce(x, async_op=True)
            total = x.sum() * 0
            work.wait()
            kept = x + total
            del x, work
            others = [torch.zeros(COUNT, device=device) for _ in range(8)]
            assert kept.sum().item() == (2 * turn + 3) * COUNT
            assert all(other.sum().item() == 0 for other in others)

            # Its pages are moved away while it runs, which costs time but must not change a byte.
            x = torch.full((COUNT,), rank + turn + 1.0, device=device)
            torch.cuda._sleep(20_000_000)
            work = dist.all_reduce(x, async_op=True)
            torch_uvm.prefetch(x, "cpu", stream=torch.cuda.Stream(device))
            work.wait()
            host = torch_uvm.to(x, "cpu")
            assert host.data_ptr() == x.data_ptr()
            assert host.double().sum().item() == (2 * turn + 3) * COUNT, "a move waits for it"
            dist.all_reduce(x)
            assert x.double().sum().item() == 2 * (2 * turn + 3) * COUNT
        """
    )


def test_data_parallel_training(two_ranks: Ranks) -> None:
    two_ranks(
        """
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        def losses(views):
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 9))
            layers.to(device)
            model = DistributedDataParallel(layers, device_ids=[rank], gradient_as_bucket_view=views)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            found = []
            for step in range(5):
                torch.manual_seed(2 * step + rank)
                x, y = torch.randn(32, 64).to(device), torch.randint(0, 9, (32,)).to(device)
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found, [*model.parameters()]

        for views in (False, True):
            native, parameters = losses(views)
            assert native == losses(views)[0], "two native runs are equal, so that the rest says something"
            assert not any(is_managed_by_cuda(p) for p in parameters)
            with torch_uvm.enabled():
                managed, parameters = losses(views)
            assert managed == native
            assert all(is_managed_by_cuda(p) and is_managed_by_cuda(p.grad) for p in parameters)
            sums = torch.stack([p.detach().double().sum() for p in parameters])
            both = [torch.empty_like(sums) for _ in range(2)]
            dist.all_gather(both, sums)
            assert torch.equal(*both), "the replicas are one model"
        """
    )
