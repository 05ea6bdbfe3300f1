"""Several GPUs: moves between them and their order, peer access, frees, and a budget per device."""

from __future__ import annotations

import gc
import os

# Read when cuBLAS is initialised.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from _cuda import LAST_PREFETCH, MIB, busy, is_managed_by_cuda, range_attribute

import torch_uvm
from torch_uvm import _C

pytestmark = pytest.mark.usefixtures("two_devices")
COUNT = 8 * MIB


@pytest.fixture(autouse=True)
def first_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(0)


class TestMoves:
    def test_share_the_bytes(self) -> None:
        x = torch_uvm.memory.ones(COUNT, device="cuda:0")
        y = torch_uvm.to(x, "cuda:1")
        assert (y.device, y.data_ptr()) == (torch.device("cuda:1"), x.data_ptr())
        y += 1
        torch.cuda.synchronize(1)
        assert x.sum().item() == 2 * COUNT
        assert torch_uvm.to(y, "cuda:0").untyped_storage()._cdata == x.untyped_storage()._cdata

    def test_start_the_bytes_moving(self) -> None:
        x = torch_uvm.memory.ones(32 * MIB, dtype=torch.uint8, device="cuda:0")
        y = torch_uvm.to(x, "cuda:1")
        torch.cuda.synchronize(1)
        assert range_attribute(y, LAST_PREFETCH) == [1]
        assert torch_uvm.residency(y) == {torch.device("cuda:1"): y.nbytes}

    @pytest.mark.parametrize("turn", range(3))
    def test_are_ordered_after_the_source_devices_stream(self, turn: int) -> None:
        x = torch_uvm.memory.zeros(COUNT, device="cuda:0")
        torch.cuda.synchronize()
        busy()
        x.fill_(turn + 1)
        y = torch_uvm.to(x, "cuda:1")
        assert y.sum().item() == (turn + 1) * COUNT

    def test_keep_gradients(self) -> None:
        x = torch_uvm.memory.ones(1000, device="cuda:0").requires_grad_()
        (torch_uvm.to(x, "cuda:1") * 3).sum().backward()
        assert x.grad is not None
        assert (x.grad.device, x.grad.sum().item()) == (torch.device("cuda:0"), 3000)

    def test_plain_copies_are_copies(self) -> None:
        with torch_uvm.enabled():
            x = torch.ones(COUNT, device="cuda:0")
            busy()
            x.fill_(5)
            y = x.to("cuda:1")
        assert y.data_ptr() != x.data_ptr() and is_managed_by_cuda(y)
        assert y.sum().item() == 5 * COUNT


class TestAllocation:
    def test_under_the_current_device(self) -> None:
        with torch_uvm.enabled():
            for index in (1, 0):
                with torch.cuda.device(index):
                    x = torch.ones(COUNT, device="cuda")
                    assert x.device.index == index and torch_uvm.is_managed(x)
                    assert torch_uvm.memory.memory_allocated(index) >= x.nbytes
                    assert torch.cuda.memory_allocated(index) >= x.nbytes
                del x

    def test_freed_under_another_current_device(self) -> None:
        gc.collect()
        torch_uvm.memory.empty_cache()
        x = torch_uvm.memory.ones(COUNT, device="cuda:0")
        with torch.cuda.device(1):
            del x
            torch_uvm.memory.empty_cache()
        assert _C.managed_bytes() == 0
        assert torch.cuda.current_device() == 0

    def test_a_label_on_one_device_of_a_segment_made_for_the_other(self) -> None:
        x = torch_uvm.memory.ones(COUNT, device="cuda:0")
        y = torch_uvm.to(x, "cuda:1")
        del x
        y *= 2
        assert y.sum().item() == 2 * COUNT
        with torch.cuda.device(1):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream(1))
                seen = y + 1
            y.record_stream(side)
        del y
        gc.collect()
        others = [torch_uvm.memory.zeros(COUNT, device=f"cuda:{index}") for index in (0, 1)]
        for index in (0, 1):
            torch.cuda.synchronize(index)
        assert seen.sum().item() == 3 * COUNT
        assert all(t.sum().item() == 0 for t in others)

    def test_statistics_go_by_device(self) -> None:
        gc.collect()
        before = [torch.cuda.memory_allocated(index) for index in (0, 1)]
        x = torch_uvm.memory.ones(4 * MIB, dtype=torch.uint8, device="cuda:1")
        assert [torch.cuda.memory_allocated(index) for index in (0, 1)] == [before[0], before[1] + 4 * MIB]
        assert any(s["device"] == 1 for s in torch.cuda.memory_snapshot())
        del x


class TestPeers:
    def test_peers_read_each_others_memory(self) -> None:
        managed = torch_uvm.memory.ones(COUNT, device="cuda:0")
        native = torch.empty(COUNT, device="cuda:1").copy_(managed)
        assert native.sum().item() == COUNT
        managed.copy_(native * 2)
        assert managed.sum().item() == 2 * COUNT

    def test_pools_of_native_memory_beside_it(self) -> None:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            native = torch.ones(COUNT, device="cuda:0")
        managed = torch_uvm.memory.empty(COUNT, device="cuda:1").copy_(native)
        assert managed.sum().item() == COUNT
        del native

    def test_training_a_model_split_between_them(self) -> None:
        def losses() -> list[float]:
            torch.manual_seed(0)
            first, second = torch.nn.Linear(64, 64).to("cuda:0"), torch.nn.Linear(64, 1).to("cuda:1")
            optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
            found = []
            for _ in range(4):
                loss = second(first(torch.ones(8, 64, device="cuda:0")).relu().to("cuda:1")).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found

        native = losses()
        with torch_uvm.enabled():
            assert losses() == native


class TestBudgets:
    def test_training_a_model_split_between_them(self) -> None:
        """Each device keeps within its own budget, and the results equal those without budgets."""
        count = 6

        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            halves = [
                torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(count))).to(f"cuda:{index}")
                for index in (0, 1)
            ]
            # 24 MiB each; gradients and moments are three times that.
            both = [*halves[0].parameters(), *halves[1].parameters()]
            optimizer = torch.optim.AdamW(both, foreach=False)
            losses = []
            for _ in range(5):
                x = torch.randn(64, 1024).to("cuda:0")
                loss = halves[1](halves[0](x).relu().to("cuda:1")).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach().cpu())
            return losses + [p.detach().cpu() for p in both]

        budgets = [48 * MIB, 64 * MIB]
        torch.use_deterministic_algorithms(True)
        try:
            torch_uvm.set_budget(None)
            with torch_uvm.enabled():
                expected = program()
            gc.collect()
            torch_uvm.memory.empty_cache()
            torch_uvm.memory.reset_peak_memory_stats()
            for index, budget in enumerate(budgets):
                torch_uvm.set_budget(budget, index)
            with torch_uvm.enabled():
                torch_uvm.memory.reset_residency_stats()
                results = program()
                figures = torch_uvm.stats()
                assert _C.check_residency() is None
        finally:
            torch.use_deterministic_algorithms(False)
            torch_uvm.set_budget(None)
        assert all(map(torch.equal, results, expected))
        assert figures["failures"] == 0 and figures["written_back"]["bytes"] > 0
        for index, budget in enumerate(budgets):
            assert figures["peak_device_bytes"][torch.device("cuda", index)] <= budget
