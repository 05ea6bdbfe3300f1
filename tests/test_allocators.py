"""Allocators besides the default one: for a scope, for single tensors, nested."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from _idle_memory import all_memory_comes_back  # noqa: F401  (every test has it)
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm.allocators import Allocator, use_allocator

MIB = 1 << 20
EMU = torch.device("emu", 0)


def counted() -> torch_uvm.allocators.CountingAllocator:
    return Allocator.pool("1MiB").with_statistics()


class TestScope:
    def test_new_tensors_use_it(self) -> None:
        mine = counted()
        with use_allocator(mine):
            x = torch.ones(1000, device="emu")
            assert torch_uvm.is_managed(x)
            assert mine.passed()["bytes"] == 4000
            y = x * 2  # outputs of kernels too
            assert mine.passed()["bytes"] == 8000
        outside = x + y
        assert mine.passed()["bytes"] == 8000
        assert outside.sum().item() == 3000
        del x, y
        assert mine.passed()["bytes"] == 0
        del outside

    def test_it_is_a_decorator_and_nests(self) -> None:
        outer, inner = counted(), counted()

        @use_allocator(inner)
        def made() -> torch.Tensor:
            return torch.zeros(100, device="emu")

        with use_allocator(outer):
            x = made()
            y = torch.zeros(50, device="emu")
            with use_allocator(None):
                z = torch.zeros(25, device="emu")
            with torch_uvm.disabled():
                plain = torch.zeros(25, device="emu")
            with torch_uvm.enabled():
                w = torch.zeros(10, device="emu")
        assert inner.passed()["bytes"] == 400
        assert outer.passed()["bytes"] == 240
        assert torch_uvm.is_managed(z) and not torch_uvm.is_managed(plain) and torch_uvm.is_managed(w)
        del x, y, z, w

    def test_does_not_apply_to_other_threads(self) -> None:
        mine = counted()
        sizes = []

        def elsewhere() -> None:
            sizes.append(torch.ones(100, device="emu").sum().item())

        with use_allocator(mine):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert sizes == [100] and mine.passed()["total_allocations"] == 0

    def test_a_training_has_the_same_bits(self) -> None:
        def train() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to("emu")
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(16, 32).to("emu")).square().mean().backward()
                optimizer.step()
            return [p.detach().cpu() for p in model.parameters()]

        wanted = train()
        mine = Allocator.caching().with_limit("64MiB").with_statistics()
        with use_allocator(mine):
            found = train()
        assert mine.passed()["total_allocations"] > 40  # backward's, too
        gc.collect()
        assert mine.passed()["bytes"] == 0
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class TestFactories:
    @pytest.mark.parametrize("make", [torch_uvm.memory.empty, torch_uvm.memory.zeros, torch_uvm.memory.ones])
    def test_single_tensors(self, make: object) -> None:
        mine = counted()
        x = make(10, 10, device="emu", allocator=mine)  # type: ignore[operator]
        y = torch_uvm.memory.full((3,), 2.0, device="cpu", allocator=mine)
        z = torch_uvm.memory.empty_like(x, allocator=mine)
        assert mine.passed()["bytes"] == 812
        assert y.tolist() == [2, 2, 2] and z.shape == (10, 10)
        del x, y, z

    def test_empty_tensors_are_managed(self) -> None:
        mine = counted()
        with use_allocator(mine):
            x = torch.ones(0, device="emu")
        y = torch_uvm.memory.empty(0, device="emu", allocator=mine)
        assert torch_uvm.is_managed(x) and torch_uvm.is_managed(y)
        assert mine.passed()["total_allocations"] == 0
        x.record_stream(torch.Stream("emu"))

    def test_invalid_arguments_are_refused(self) -> None:
        with pytest.raises(TypeError, match="allocator is 3"):
            torch_uvm.memory.empty(1, device="emu", allocator=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="accepted: a torch_uvm.allocators.Allocator"):
            use_allocator("pool")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="makes none"):
            Allocator(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="upstream is 'x'"):
            Allocator.caching(upstream="x")  # type: ignore[arg-type]


class TestLimits:
    def test_beyond_a_limit_is_out_of_memory(self) -> None:
        small = Allocator.process().with_limit("1KiB")
        with use_allocator(small):
            x = torch.ones(200, device="emu")
            with pytest.raises(torch.OutOfMemoryError, match=r"limit\(caching, 1.00 KiB\)"):
                torch.ones(100, device="emu")
            del x
            torch.ones(256, device="emu")

    def test_a_callback_makes_room(self) -> None:
        asked = []
        cache = [
            torch_uvm.memory.ones(
                200, device="emu", allocator=(small := Allocator.process().with_limit(1024))
            )
        ]

        def clear(count: int, device: torch.device) -> bool:
            asked.append((count, device))
            had = bool(cache)
            cache.clear()
            return had

        careful = small.with_failure_callback(clear)
        x = torch_uvm.memory.ones(256, device="emu", allocator=careful)
        assert asked == [(1024, EMU)]
        with pytest.raises(torch.OutOfMemoryError):
            torch_uvm.memory.ones(1, device="emu", allocator=careful)
        assert len(asked) == 2
        del x

    def test_an_exception_of_a_callback_is_raised(self) -> None:
        def fail(count: int, device: torch.device) -> bool:
            raise KeyError(count)

        careful = Allocator.process().with_limit(0).with_failure_callback(fail)
        with use_allocator(careful), pytest.raises(KeyError, match="40"):
            torch.ones(10, device="emu")

    def test_a_pool(self) -> None:
        with pytest.raises(ValueError, match="begins with"):
            Allocator.pool("2MiB", maximum="1MiB")
        pool = Allocator.pool("4MiB", maximum="32MiB")
        calls = pool.stats()["upstream_allocations"]
        xs = [torch_uvm.memory.empty(256, 1024, device="emu", allocator=pool) for _ in range(3)]
        assert pool.stats()["requested_bytes"] == 3 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch_uvm.memory.empty(40 * MIB, dtype=torch.uint8, device="emu", allocator=pool)
        assert pool.stats()["upstream_allocations"] >= calls
        del xs
        assert pool.release() > 0 and pool.stats()["reserved_bytes"] == 0


class TestIdleMemory:
    def test_idle_memory_of_a_pool_is_released_for_others(self) -> None:
        pool = Allocator.pool("24MiB")
        torch_uvm.memory.empty_cache()
        torch_uvm.set_limit(torch_uvm.memory.memory_reserved() + 16 * MIB)
        x = torch_uvm.memory.empty(20 * MIB, dtype=torch.uint8, device="emu")
        assert pool.stats()["reserved_bytes"] == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch_uvm.memory.empty(40 * MIB, dtype=torch.uint8, device="emu", allocator=pool)
        del x

    def test_idle_memory_of_arenas_and_plans_is_released(self) -> None:
        scratch, plan = (
            torch_uvm.allocators.arena("16MiB"),
            torch_uvm.allocators.allocation_plan("idle memory"),
        )
        with scratch:
            torch.ones(10, device="emu")
        for _ in range(2):
            with plan:
                torch.empty(12 * MIB, dtype=torch.uint8, device="emu")
        assert scratch.stats()["reserved_bytes"] + plan.stats()["reserved_bytes"] >= 28 * MIB
        torch_uvm.memory.empty_cache()
        reserved = torch_uvm.memory.memory_reserved()
        torch_uvm.set_limit(reserved)
        x = torch_uvm.memory.empty(24 * MIB, dtype=torch.uint8, device="emu")
        del x
        torch_uvm.set_limit(reserved + 64 * MIB)
        with plan, scratch:
            assert torch.ones(10, device="emu").sum().item() == 10
        plan.release()


class TestTensors:
    """Operations on managed tensors work on tensors of these allocators."""

    def test_moves_alias(self) -> None:
        mine = counted()
        x = torch_uvm.memory.ones(8, device="emu", allocator=mine)
        here = torch_uvm.to(x, "cpu")
        here[0] = 5
        assert here.data_ptr() == x.data_ptr() and x[0].item() == 5
        back = torch_uvm.to(here, "emu")
        assert back.data_ptr() == x.data_ptr()
        del x, back
        assert mine.passed()["bytes"] == 32
        assert here.tolist() == [5] + [1] * 7
        del here
        assert mine.passed()["bytes"] == 0

    def test_numpy_dlpack_and_streams(self) -> None:
        mine = counted()
        x = torch_uvm.memory.ones(8, device="cpu", allocator=mine)
        array = x.numpy()
        array[1] = 3
        assert x[1] == 3
        y = torch_uvm.memory.from_dlpack(torch_uvm.to(x, "emu"))
        assert y.sum().item() == 10
        stream = torch.Stream("emu")
        y.record_stream(stream)
        del x, y
        assert np.array_equal(array, [1, 3, 1, 1, 1, 1, 1, 1])
        del array

    def test_resize_and_hints(self) -> None:
        mine = counted()
        x = torch_uvm.memory.empty(MIB, device="emu", allocator=mine)
        torch_uvm.prefetch(x, "cpu")
        assert sum(torch_uvm.residency(x).values()) == 4 * MIB
        torch_uvm.discard(x)
        with pytest.raises(ValueError, match="advice about a tensor"):
            torch_uvm.advise(x, read_mostly=True)
        x.resize_(2 * MIB)
        x.fill_(1)
        assert x.sum().item() == 2 * MIB
        del x
        assert mine.passed()["bytes"] == 0

    def test_budgets_count_them(self, spawn: Spawn) -> None:
        """In a process of its own, because memory of earlier tests could already exceed this budget.

        What does not fit is created on the host.
        """
        spawn(
            """
            import torch, torch_uvm
            torch_uvm.set_budget("8MiB")
            torch_uvm.set_limit("12MiB")  # above the budget, or it could be exceeded by one operator
            own = torch_uvm.allocators.Allocator.caching()
            held = torch_uvm.memory.empty(6 << 20, dtype=torch.uint8, device="emu", allocator=own)
            for over_budget in (True, False):
                with torch_uvm.enabled():
                    x = torch.ones(6 << 20, dtype=torch.uint8, device="emu")  # `held` cannot be evicted
                assert x.sum(dtype=torch.int64).item() == 6 << 20
                stats = torch_uvm.stats()
                assert (stats["over_budget"] > 0) is over_budget
                assert all(bytes <= 8 << 20 for bytes in stats["peak_device_bytes"].values())
                torch_uvm.memory.reset_residency_stats()
                held = x = None
            """
        )
