"""Memory of the emulated accelerator: bounded by the device while torch_uvm is off, not while it is on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C, emulated

emu: Any = torch.get_device_module("emu")
MIB = 1024**2
CAPACITY = 256 * MIB


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    gc.collect()
    emu.empty_cache()
    emu.reset_peak_memory_stats()
    emu.reset_accumulated_memory_stats()
    assert emu.memory_allocated() == 0, "another test's tensor is alive"
    yield
    gc.collect()
    assert _C.emu_check_plain_allocator() is None


def _bytes(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="emu")


class TestPlainMemory:
    def test_ends_at_the_capacity(self) -> None:
        with pytest.raises(torch.OutOfMemoryError, match=r"300.00 MiB.*of 256.00 MiB"):
            _bytes(300)
        kept = [_bytes(50) for _ in range(4)]
        with pytest.raises(torch.OutOfMemoryError):
            _bytes(100)
        del kept

    def test_is_complete_after_running_out(self) -> None:
        held = []
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                held.append(torch.ones(4 * MIB, device="emu"))
        assert 12 <= len(held) <= 16, "tensors of 16 MiB each"
        assert held[0][0].item() == held[-1][-1].item() == 1
        assert emu.memory_allocated() == len(held) * 16 * MIB
        del held
        gc.collect()
        assert emu.memory_allocated() == 0
        x = torch.ones(200 * MIB, dtype=torch.uint8, device="emu")
        assert x[-1] == 1

    def test_operators_run_out_and_leak_nothing(self) -> None:
        x = torch.ones(40 * MIB, device="emu")  # 160 MiB
        calls: list[Callable[[], Any]] = [
            lambda: x + 1,
            lambda: torch.cat([x, x]),
            lambda: x.double(),
            lambda: x.clone(),
        ]
        for call in calls:
            with pytest.raises(torch.OutOfMemoryError):
                call()
            assert emu.memory_allocated() == 160 * MIB
        assert x.add_(1)[-1] == 2

    def test_counts_running_out(self) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            _bytes(300)
        stats = emu.memory_stats()
        assert stats["num_ooms"] == 1 and stats["num_alloc_retries"] >= 1

    def test_cached_memory_makes_room(self) -> None:
        for mebibytes in (200, 210, 220, 190):
            _bytes(mebibytes)  # each one needs the cached memory of the previous one
        assert emu.memory_stats()["num_ooms"] == 0

    def test_pieces_of_the_cache_make_room(self) -> None:
        pieces = [_bytes(24) for _ in range(10)]
        del pieces
        assert _bytes(230).numel() == 230 * MIB

    def test_running_out_in_backward(self) -> None:
        x: Any = torch.ones(12 * MIB, device="emu", requires_grad=True)  # 48 MiB
        y = (x.exp() * 2).exp().sum()
        filler = _bytes(100)
        with pytest.raises(torch.OutOfMemoryError):
            y.backward()
        del filler, y
        gc.collect()
        x.grad = None
        assert emu.memory_allocated() == 48 * MIB
        x.sum().backward()
        assert x.grad is not None and x.grad[-1] == 1

    def test_other_devices_have_their_own(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm, unittest
            emu = torch.get_device_module("emu")
            a = torch.empty(50 << 20, dtype=torch.uint8, device="emu:0")
            b = torch.empty(50 << 20, dtype=torch.uint8, device="emu:1")
            with unittest.TestCase().assertRaisesRegex(torch.OutOfMemoryError, "device 1"):
                torch.empty(50 << 20, dtype=torch.uint8, device="emu:1")  # 100 MiB in 64
            assert emu.memory_allocated(0) == emu.memory_allocated(1) == 50 << 20
            assert emu.mem_get_info(1)[1] == 64 << 20 and emu.mem_get_info(1)[0] <= 14 << 20
            with torch_uvm.enabled():
                c = torch.ones(100 << 20, dtype=torch.uint8, device="emu:1")
            assert c[0].item() == c[-1].item() == 1
            """,
            env={"TORCH_UVM_CONF": "emulated_devices:2,emulated_memory:64MiB"},
        )


class TestCache:
    @pytest.fixture(params=["plain", "managed"], autouse=True)
    def kind(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with torch_uvm.enabled() if request.param == "managed" else torch_uvm.disabled():
            yield

    def test_caches_freed_memory(self) -> None:
        x = _bytes(30)
        address, reserved = x.data_ptr(), emu.memory_reserved()
        del x
        assert emu.memory_allocated() == 0 and emu.memory_reserved() == reserved >= 30 * MIB
        before = emulated.counters()["allocate_calls"]
        assert _bytes(30).data_ptr() == address
        assert emulated.counters()["allocate_calls"] == before

    def test_can_be_emptied(self) -> None:
        x = _bytes(30)
        y = _bytes(30)
        del x
        emu.empty_cache()
        assert emu.memory_reserved() >= emu.memory_allocated() == 30 * MIB
        del y
        torch.accelerator.empty_cache()
        assert emu.memory_reserved() == 0

    def test_peaks(self) -> None:
        x = _bytes(20)
        y = _bytes(10)
        del x
        assert emu.max_memory_allocated() == 30 * MIB and emu.max_memory_reserved() >= 30 * MIB
        emu.reset_peak_memory_stats()
        assert emu.max_memory_allocated() == 10 * MIB
        del y
        assert emu.max_memory_allocated() == 10 * MIB

    def test_sums(self) -> None:
        for _ in range(3):
            _bytes(10)
        stats = emu.memory_stats()
        assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 30 * MIB
        assert stats["allocation.all.allocated"] == 3
        emu.reset_accumulated_memory_stats()
        assert emu.memory_stats()["allocation.all.allocated"] == 0

    def test_free_memory_is_what_is_not_in_use(self) -> None:
        before, total = emu.mem_get_info()
        x = _bytes(64).fill_(1)
        assert total == CAPACITY and before - emu.mem_get_info()[0] >= 64 * MIB
        del x
        emu.empty_cache()
        assert emu.mem_get_info()[0] == before

    def test_statistics_have_the_keys_of_accelerators(self) -> None:
        x = _bytes(1)
        stats = torch.accelerator.memory_stats()
        assert stats == emu.memory_stats("emu:0")
        for group in ("allocation", "segment", "active", "inactive_split"):
            for suffix in ("", "_bytes") if group in ("active", "inactive_split") else ("",):
                for pool in ("all", "large_pool", "small_pool"):
                    for figure in ("current", "peak", "allocated", "freed"):
                        assert f"{group}{suffix}.{pool}.{figure}" in stats
        for key in ("allocated_bytes.all.current", "reserved_bytes.all.peak", "requested_bytes.all.current"):
            assert stats[key] >= MIB
        assert {"num_alloc_retries", "num_ooms"} <= set(stats)
        del x

    def test_temporaries_of_kernels_are_device_memory(self) -> None:
        x = torch.rand(MIB, device="emu")
        emu.reset_peak_memory_stats()
        torch.sort(x.view(1024, 1024), dim=0)
        assert emu.max_memory_allocated() > emu.memory_allocated()

    def test_an_exception_in_a_kernel_leaks_nothing(self) -> None:
        x = torch.ones(4, 4, device="emu")
        before = emu.memory_allocated()
        for call in (
            lambda: x @ torch.ones(3, device="emu"),
            lambda: x.view(3),
            lambda: torch.linalg.inv(x),
            lambda: x[torch.tensor([7])],
            lambda: torch.nn.functional.nll_loss(x, torch.full((4,), 9, device="emu")),
        ):
            with pytest.raises((RuntimeError, IndexError)):
                call()
        assert emu.memory_allocated() == before and x.eq(1).all()

    def test_empty_tensors_allocate_nothing(self) -> None:
        x = torch.empty(0, 5, device="emu")
        y = x + 1
        assert y.shape == (0, 5) and emu.memory_allocated() == 0


class TestManagedMemory:
    def test_is_larger_than_the_device(self) -> None:
        torch_uvm.enable(budget=None)  # migration by the driver
        tensors = [torch.full((16 * MIB,), float(i), device="emu") for i in range(8)]  # 512 MiB
        assert emu.memory_allocated() == 2 * CAPACITY
        assert emulated.resident_bytes() <= CAPACITY
        for i, x in enumerate(tensors):
            assert x.min() == x.max() == i
        total = sum(tensors[1:], tensors[0])
        assert total[0] == total[-1] == 28

    def test_one_tensor_may_be_larger(self) -> None:
        torch_uvm.enable()
        x = torch.zeros(CAPACITY + 64 * MIB, dtype=torch.uint8, device="emu")
        x[::MIB] = 1
        assert x.sum() == 320 and torch_uvm.is_managed(x)

    def test_ends_at_the_limit_by_name(self) -> None:
        torch_uvm.enable(limit="100MiB", budget=None)
        kept = _bytes(60)
        with pytest.raises(torch.OutOfMemoryError, match=r"managed memory limit.*of 100.00 MiB"):
            _bytes(60)
        assert torch_uvm.memory.memory_reserved() <= 100 * MIB
        with pytest.raises(torch.OutOfMemoryError, match="limit"):
            kept + 1
        assert emu.memory_allocated() == 60 * MIB and kept.fill_(3)[-1] == 3
        torch_uvm.set_limit(None)
        assert _bytes(60).numel() == 60 * MIB

    def test_leaves_plain_memory_as_it_is(self) -> None:
        """Managed pages are evicted for plain memory, which has priority."""
        torch_uvm.enable()
        managed = torch.ones(200 * MIB, dtype=torch.uint8, device="emu")
        torch_uvm.disable()
        plain = torch.full((150 * MIB,), 2, dtype=torch.uint8, device="emu")
        assert emulated.resident_bytes() <= CAPACITY - 150 * MIB
        assert managed.max() == managed.min() == 1 and plain.max() == plain.min() == 2

    def test_counts_beside_plain_memory(self) -> None:
        plain = _bytes(10)
        with torch_uvm.enabled():
            managed = _bytes(20)
        assert emu.memory_allocated() == 30 * MIB and torch_uvm.memory.memory_allocated() == 20 * MIB
        del plain
        assert emu.memory_allocated() == torch_uvm.memory.memory_allocated() == managed.numel()


class TestSwitching:
    def test_existing_tensors_keep_their_memory(self) -> None:
        before = torch.arange(1000.0, device="emu")
        torch_uvm.enable()
        during = torch.arange(1000.0, device="emu")
        torch_uvm.disable()
        after = torch.arange(1000.0, device="emu")
        assert [torch_uvm.is_managed(x) for x in (before, during, after)] == [False, True, False]
        assert torch.equal(before + during, after * 2)
        assert not torch_uvm.is_managed(before + during)

    def test_resizing_follows_the_switch(self) -> None:
        x = torch.arange(4.0, device="emu")
        torch_uvm.enable()
        x.resize_(100 * MIB)
        assert torch_uvm.is_managed(x) and x[:4].tolist() == [0, 1, 2, 3]

    def test_in_the_middle_of_training(self) -> None:
        def train(switch: bool) -> list[float]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
            model.to("emu")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            losses = []
            for step in range(8):
                if switch:
                    (torch_uvm.enable if step % 3 == 1 else torch_uvm.disable)()
                optimizer.zero_grad()
                loss = model(torch.rand(16, 8, device="emu")).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        assert train(True) == train(False)

    def test_blocks_are_freed_to_their_allocator(self) -> None:
        torch_uvm.enable()
        managed = _bytes(8)
        torch_uvm.disable()
        plain = _bytes(4)
        del managed
        assert torch_uvm.memory.memory_allocated() == 0
        torch_uvm.enable()
        del plain
        assert emu.memory_allocated() == 0


class TestPinnedMemory:
    def test_is_recognised(self) -> None:
        x = torch.arange(10.0)
        assert not x.is_pinned()
        pinned = x.pin_memory()
        assert pinned.is_pinned() and pinned[3:].is_pinned() and torch.equal(pinned, x)
        assert pinned.pin_memory() is pinned
        assert torch.empty(3, pin_memory=True).is_pinned() and torch.zeros(3).pin_memory("emu").is_pinned()
        assert not pinned.clone().is_pinned() and not (pinned + 1).is_pinned()

    def test_device_tensors_cannot_be_pinned(self) -> None:
        x = torch.ones(2, device="emu")
        assert not x.is_pinned()
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            x.pin_memory()

    def test_is_ordinary_memory_to_the_cpu(self) -> None:
        x = torch.zeros(100).pin_memory()
        x += 1
        assert x.sum() == 100 and x.numpy().sum() == 100
        assert torch.zeros(0).pin_memory().numel() == 0

    def test_copies_both_ways(self) -> None:
        x = torch.rand(1000, 100).pin_memory()
        there = x.to("emu", non_blocking=True)
        back = torch.empty_like(x).pin_memory()
        back.copy_(there, non_blocking=True)
        emu.synchronize()
        assert torch.equal(back, x)
        again = there.to("cpu", non_blocking=True)
        emu.synchronize()
        assert torch.equal(again, x)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_data_loader(self, workers: int) -> None:
        torch.ones(1, device="emu")  # starts the device before workers are forked
        x = torch.arange(64.0)
        data = torch.utils.data.TensorDataset(x, x * 2)
        context = "fork" if workers else None
        loader = torch.utils.data.DataLoader(
            data, batch_size=8, num_workers=workers, pin_memory=True, multiprocessing_context=context
        )
        seen = []
        for a, b in loader:
            assert a.is_pinned() and b.is_pinned()
            there = a.to("emu", non_blocking=True)
            assert torch.equal((there * 2).cpu(), b)
            seen += a.tolist()
        assert seen == x.tolist()

    def test_workers_may_not_use_the_device(self) -> None:
        torch.ones(1, device="emu")

        def collate(batch: list[int]) -> str:
            try:
                return str(torch.tensor(batch, device="emu"))
            except RuntimeError as error:
                return str(error)

        data: Any = list(range(4))
        loader: Any = torch.utils.data.DataLoader(
            data, num_workers=1, multiprocessing_context="fork", collate_fn=collate
        )
        assert all("forked process" in message and "'spawn'" in message for message in loader)
