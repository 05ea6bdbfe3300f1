"""The allocator that replaces CUDA's, as PyTorch sees it: figures, failures, pools, graphs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _cuda import MANAGED, MIB, NATIVE, is_managed_by_cuda, memory_kind
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C


def block(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


@pytest.fixture(autouse=True)
def from_nothing() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch_uvm.memory.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


class TestKind:
    def test_memory_kinds_by_cuda(self) -> None:
        plain = block(1)
        with torch_uvm.enabled():
            managed = block(1)
        assert (memory_kind(plain.data_ptr()), memory_kind(managed.data_ptr())) == (NATIVE, MANAGED)
        assert memory_kind(torch_uvm.memory.ones(4, device="cpu").data_ptr()) == MANAGED

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,)])
    def test_smallest_shapes(self, shape: tuple[int, ...]) -> None:
        with torch_uvm.enabled():
            x = torch.zeros(shape, device="cuda")
        assert torch_uvm.to(x, "cpu").tolist() == torch.zeros(shape).tolist()
        torch_uvm.prefetch(x)


class TestFigures:
    def test_current_figures_sum_both_kinds(self) -> None:
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        plain = block(8)
        with torch_uvm.enabled():
            managed = block(16)
        assert torch.cuda.memory_allocated() - before[0] == 24 * MIB
        assert torch.cuda.memory_reserved() - before[1] >= 24 * MIB
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
        assert torch_uvm.memory.memory_allocated() == 16 * MIB
        del plain, managed
        assert torch.cuda.memory_allocated() == before[0]

    def test_peak_is_the_sum_of_both_peaks(self) -> None:
        before = torch.cuda.memory_allocated()
        with torch_uvm.enabled():
            managed = block(8)
        plain = block(24)
        assert torch.cuda.max_memory_allocated() - before == 32 * MIB
        del managed, plain
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before
        assert torch.accelerator.max_memory_allocated() == before

    def test_summary_and_snapshot_contain_managed_memory(self) -> None:
        with torch_uvm.enabled():
            x = block(24)
        assert "24" in torch.cuda.memory_summary()
        segments = [
            s
            for s in torch.cuda.memory_snapshot()
            if s["address"] <= x.data_ptr() < s["address"] + s["total_size"]
        ]
        assert len(segments) == 1
        assert segments[0]["allocated_size"] >= 24 * MIB
        assert any(b["size"] >= 24 * MIB and b["state"] == "active_allocated" for b in segments[0]["blocks"])

    def test_empty_cache_releases_both_kinds(self) -> None:
        torch.cuda.empty_cache()  # cached by earlier tests
        before = torch.cuda.memory_reserved()
        for scope in (torch_uvm.enabled, torch_uvm.disabled):
            with scope():
                block(24)  # its size differs from a cuBLAS workspace
        assert torch.cuda.memory_reserved() - before >= 48 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before
        assert _C.managed_bytes() == torch_uvm.memory.memory_reserved() == 0

    def test_a_steady_state_makes_no_runtime_allocations(self) -> None:
        with torch_uvm.enabled():
            model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
            optimizer = torch.optim.AdamW(model.parameters())

            def step() -> None:
                model(torch.ones(32, 256, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(3):
                step()
            before = (
                torch_uvm.memory.memory_stats()["num_device_alloc"],
                torch.cuda.memory_stats()["num_device_alloc"],
            )
            for _ in range(5):
                step()
            after = (
                torch_uvm.memory.memory_stats()["num_device_alloc"],
                torch.cuda.memory_stats()["num_device_alloc"],
            )
        assert after == before


class TestOutOfMemory:
    @pytest.fixture(autouse=True)
    def small_limit(self) -> Iterator[None]:
        torch_uvm.set_limit("64MiB")
        torch_uvm.set_budget(None)  # without a budget no storage is evicted
        yield
        torch_uvm.set_budget("auto")
        torch.cuda.empty_cache()

    def test_raises_pytorchs_error_and_stays_usable(self) -> None:
        with torch_uvm.enabled():
            for _ in range(20):
                with pytest.raises(torch.OutOfMemoryError, match="64"):
                    block(65)
            kept = block(60)
            with pytest.raises(torch.cuda.OutOfMemoryError):
                block(8)
            assert kept.fill_(1)[-1].item() == 1
        assert _C.managed_bytes() <= 64 * MIB

    def test_a_budget_makes_room_instead(self) -> None:
        torch_uvm.set_budget("1GiB")  # the limit is exceeded, not the budget
        with torch_uvm.enabled():
            first = block(60).fill_(1)
            second = block(8).fill_(2)
            assert int(first.min()) == int(first.max()) == 1 and int(second[-1]) == 2
        assert _C.managed_bytes() <= 64 * MIB

    def test_the_automatic_budget_evicts_at_once(self) -> None:
        torch_uvm.set_budget("auto")
        with torch_uvm.enabled():
            first = block(60).fill_(1)
            second = block(8).fill_(2)
            assert int(first.min()) == int(first.max()) == 1 and int(second[-1]) == 2
        assert _C.managed_bytes() <= 64 * MIB

    def test_from_operators_and_from_backward_threads(self) -> None:
        with torch_uvm.enabled():
            x = torch.ones(10 * MIB // 4, device="cuda", requires_grad=True)
            with pytest.raises(torch.OutOfMemoryError):
                x.expand(20, -1).contiguous()
            with pytest.raises(torch.OutOfMemoryError):
                x.expand(4, -1).exp().sum().backward()
            del x
            assert block(50).numel() == 50 * MIB, "the failed allocations leaked"

    def test_a_script_that_halves_its_batch(self) -> None:
        sizes = []
        batch = 256
        with torch_uvm.enabled():
            while batch:
                try:
                    sizes.append(block(batch).numel())
                    break
                except torch.OutOfMemoryError:
                    batch //= 2
        assert sizes == [32 * MIB] or sizes == [64 * MIB]

    def test_cached_segments_are_released_first(self) -> None:
        with torch_uvm.enabled():
            small = [block(3) for _ in range(12)]
            del small
            assert block(50).numel() == 50 * MIB

    def test_native_memory_is_not_bounded_by_it(self) -> None:
        assert block(256).numel() == 256 * MIB

    def test_observers_are_notified(self, spawn: Spawn) -> None:
        """In another process: PyTorch cannot detach an observer."""
        spawn(
            """
            import torch, torch_uvm
            heard = []
            torch_uvm.set_limit("64MiB")
            torch_uvm.enable()
            # Our allocator is installed here; observers attached earlier would only observe the native one.
            torch.cuda.init()
            torch._C._cuda_attach_out_of_memory_observer(lambda *words: heard.append(words))
            kept = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
            for expected in (1, 2):
                try:
                    torch.empty(65 << 20, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    pass
                else:
                    raise AssertionError("over the limit")
                assert len(heard) == expected, heard
            assert heard[0][0] == 0 and all(isinstance(word, int) for word in heard[0]), heard
            """
        )

    def test_uncaught_ends_a_process_with_a_message(self, spawn: Spawn) -> None:
        """A prototype died of a signal here."""
        done = spawn(
            """
            import torch, torch_uvm
            torch_uvm.set_limit("64MiB")
            torch_uvm.enable()
            torch.empty(65 << 20, dtype=torch.uint8, device="cuda")
            """,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "OutOfMemoryError" in done.stderr


class TestGraphsAndPools:
    def test_a_capture_wins_over_the_switch(self) -> None:
        with torch_uvm.enabled():
            x = torch.ones(1024, device="cuda")
            for _ in range(2):
                y = x * 2 + 1
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x * 2
                z = y + 1
            assert is_managed_by_cuda(x) and not is_managed_by_cuda(y) and not is_managed_by_cuda(z)
            for value in (5.0, 7.0):
                x.fill_(value)
                graph.replay()
                assert z.tolist() == [2 * value + 1] * 1024
            assert is_managed_by_cuda(torch.ones(4, device="cuda")), "after the capture the switch applies"

    def test_a_captured_training_step_replays(self) -> None:
        def losses(on: bool) -> list[float]:
            with torch_uvm.enabled() if on else torch_uvm.disabled():
                torch.manual_seed(0)
                model = nn.Linear(64, 64).cuda()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                x = torch.randn(32, 64, device="cuda")
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        optimizer.zero_grad(set_to_none=True)
                        model(x).square().mean().backward()
                        optimizer.step()
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                optimizer.zero_grad(set_to_none=True)
                with torch.cuda.graph(graph):
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                seen = []
                for _ in range(5):
                    graph.replay()
                    seen.append(loss.item())
                assert seen[-1] < seen[0]
                return seen

        assert losses(True) == losses(False)

    def test_a_pools_scope_wins_over_the_switch(self) -> None:
        pool = torch.cuda.MemPool()
        with torch_uvm.enabled():
            with torch.cuda.use_mem_pool(pool):
                inside = torch.full((1024,), 3.0, device="cuda")
            after = torch.ones(1024, device="cuda")
        assert not is_managed_by_cuda(inside) and is_managed_by_cuda(after)
        assert (inside + after).sum().item() == 4096
        del inside

    def test_pool_of_managed_memory(self) -> None:
        pool = torch_uvm.allocators.mem_pool()
        assert isinstance(pool, torch.cuda.MemPool)
        with torch.cuda.use_mem_pool(pool):
            x = torch.full((1 << 20,), 3.0, device="cuda")
        y = torch.ones(4, device="cuda")
        assert is_managed_by_cuda(x) and not is_managed_by_cuda(y)
        assert x.sum().item() == 3 << 20
        assert _C.managed_bytes() >= 4 * MIB, "it counts against the limit"
        del x
        torch.cuda.empty_cache()

    def test_pool_of_managed_memory_keeps_the_limit(self) -> None:
        torch_uvm.set_limit("64MiB")
        pool = torch_uvm.allocators.mem_pool()
        with torch.cuda.use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError):
            block(65)
        assert _C.managed_bytes() <= 64 * MIB

    def test_graph_in_a_pool_of_managed_memory(self) -> None:
        pool = torch_uvm.allocators.mem_pool()
        x = torch.ones(1024, device="cuda")
        with torch.cuda.use_mem_pool(pool):
            # Reserved in advance: cudaMallocManaged fails during a capture.
            torch.empty(4 * MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        handle: Any = pool.id  # torch's stubs only accept handles of graph_pool_handle()
        with torch.cuda.graph(graph, pool=handle):
            y = x * 2
        x.fill_(4)
        graph.replay()
        assert y.tolist() == [8.0] * 1024
        del y, graph


class TestEntryPoints:
    def test_called_from_c(self) -> None:
        library = ctypes.CDLL(_C.__file__)
        malloc, free = library.torch_uvm_malloc, library.torch_uvm_free
        malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.restype = None
        free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        stream = torch.cuda.current_stream().cuda_stream
        before = _C.managed_bytes()
        address = malloc(MIB, 0, stream)
        assert memory_kind(address) == MANAGED
        assert _C.managed_bytes() >= before + MIB, "it counts against the limit"
        free(address, MIB, 0, stream)
        assert _C.managed_bytes() == before

    def test_pluggable_allocator_in_a_pool(self) -> None:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _C.__file__, "torch_uvm_malloc", "torch_uvm_free"
        )
        pool = torch.cuda.MemPool(allocator.allocator())
        with torch.cuda.use_mem_pool(pool):
            x = torch.ones(1 << 20, device="cuda")
        assert is_managed_by_cuda(x) and x.sum().item() == 1 << 20
        del x, pool
        torch.cuda.empty_cache()

    def test_pluggable_allocator_of_a_process(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
            library = torch_uvm._C.__file__
            change_current_allocator(CUDAPluggableAllocator(library, "torch_uvm_malloc", "torch_uvm_free"))
            x = torch.ones(1 << 20, device="cuda", requires_grad=True)
            x.exp().sum().backward()
            assert torch_uvm._C.managed_bytes() >= 8 << 20
            assert x.grad.sum().item() > 0
            """
        )


class TestInterprocessHandles:
    def test_are_refused_by_name_with_a_remedy(self) -> None:
        x = torch_uvm.memory.ones(1000)
        with pytest.raises(RuntimeError, match="managed"):
            x.untyped_storage()._share_cuda_()
        plain = x.to("cuda", managed=False)  # type: ignore[call-overload]
        assert plain.untyped_storage()._share_cuda_() is not None
