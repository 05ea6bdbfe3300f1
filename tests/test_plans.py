"""torch_uvm.allocators.allocation_plan: serves by index from the second iteration on, and is correct for any
iteration."""

from __future__ import annotations

import itertools

import pytest
import torch
from _idle_memory import all_memory_comes_back  # noqa: F401  (every test has it)
from _models import make_workspaces
from torch import nn

import torch_uvm
from torch_uvm.allocators import AllocationPlan

_names = (f"test {number}" for number in itertools.count())


@pytest.fixture
def plan() -> AllocationPlan:
    return torch_uvm.allocators.allocation_plan(next(_names))


def iterate(plan: AllocationPlan, *sizes: int) -> list[int]:
    """Addresses of consecutive tensors, each freed before the next."""
    addresses = []
    with plan:
        for size in sizes:
            x = torch.full((size,), 3.0, device="emu")
            addresses.append(x.data_ptr())
            assert x.sum().item() == 3 * size
            del x
    return addresses


class TestServing:
    def test_by_index_from_the_second_iteration_on(self, plan: AllocationPlan) -> None:
        iterate(plan, 100, 200, 300)
        first = plan.report()
        assert first["hits"] == 0 and first["plans"] == 1 and first["planned_requests"] >= 3
        second = iterate(plan, 100, 200, 300)
        calls = plan.stats()["upstream_allocations"]
        assert iterate(plan, 100, 200, 300) == second
        assert plan.stats()["upstream_allocations"] == calls
        report = plan.report()
        assert report["hits"] == 2 * report["requests"] and report["misses"] == 0
        assert report["planned_bytes"] < 2 * 1536  # consecutive tensors share bytes

    def test_after_an_iteration_of_what_outlives_it(self, plan: AllocationPlan) -> None:
        kept = []
        with plan:
            kept.append(torch.ones(100, device="emu"))
        iterate(plan, 100, 200)
        misses = plan.report()["misses"]
        iterate(plan, 100, 200)
        assert plan.report()["misses"] == misses and plan.report()["planned_bytes"] > 0

    def test_the_layout_of_a_model_is_near_its_peak(self, plan: AllocationPlan) -> None:
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]).to(
            "emu"
        )
        batch = torch.randn(64, 256).to("emu")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        make_workspaces("emu")
        for _ in range(3):
            with plan:
                model(batch).square().mean().backward()
        report = plan.report()
        assert report["misses"] == 0 and report["hits"] > 20
        assert report["planned_requests"] == len(report["layout"])
        assert 0 < report["peak_live_bytes"] <= report["planned_bytes"] <= 1.05 * report["peak_live_bytes"]
        for one, other in itertools.combinations(report["layout"], 2):
            apart = one[0] + one[1] <= other[0] or other[0] + other[1] <= one[0]
            assert apart or one[3] <= other[2] or other[3] <= one[2], (one, other)


class TestDifferences:
    def test_other_sizes_fall_back_and_are_planned_next(self, plan: AllocationPlan) -> None:
        for _ in range(2):
            iterate(plan, 100, 200)
        iterate(plan, 100, 999, 50)
        assert plan.report()["misses"] > 0
        misses = plan.report()["misses"]
        iterate(plan, 100, 999, 50)
        assert plan.report()["misses"] == misses

    def test_tensors_that_outlive_an_iteration_keep_their_bytes(self, plan: AllocationPlan) -> None:
        for _ in range(2):
            iterate(plan, 64, 64)
        with plan:
            kept = torch.full((64,), 7.0, device="emu")
            torch.full((64,), 8.0, device="emu")
        for _ in range(3):
            iterate(plan, 64, 64)
        assert kept.tolist() == [7.0] * 64
        assert plan.report()["outlived"] == 1

    def test_a_training_has_the_same_bits(self, plan: AllocationPlan) -> None:
        def train(plan: AllocationPlan | None) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to("emu")
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(8):
                batch = torch.randn(16 if step % 3 else 24, 32).to("emu")
                optimizer.zero_grad()
                if plan is None:
                    model(batch).square().mean().backward()
                else:
                    with plan:
                        model(batch).square().mean().backward()
                optimizer.step()
            return [p.detach().cpu() for p in model.parameters()]

        wanted = train(None)
        assert all(torch.equal(a, b) for a, b in zip(train(plan), wanted, strict=True))

    def test_an_exception_ends_the_iteration(self, plan: AllocationPlan) -> None:
        iterate(plan, 10, 20)
        with pytest.raises(KeyError), plan:
            torch.ones(10, device="emu")
            raise KeyError
        iterate(plan, 10, 20)
        iterate(plan, 10, 20)
        assert plan.report()["iterations"] == 4


class TestNames:
    def test_the_same_name_is_the_same_plan(self) -> None:
        name = next(_names)
        assert torch_uvm.allocators.allocation_plan(name) is torch_uvm.allocators.allocation_plan(
            name, device="emu:0"
        )
        assert torch_uvm.allocators.allocation_plan(name) is not torch_uvm.allocators.allocation_plan(
            name, device="cpu"
        )
        assert (
            repr(torch_uvm.allocators.allocation_plan(name))
            == f"torch_uvm.allocators.allocation_plan({name!r})"
        )

    def test_invalid_arguments_are_refused(self, plan: AllocationPlan) -> None:
        for name in ("", 3, None):
            with pytest.raises(TypeError, match="accepted: a string"):
                torch_uvm.allocators.allocation_plan(name)  # type: ignore[arg-type]
        with plan:
            with pytest.raises(ValueError, match="under way"), plan:
                pass
            x = torch.ones(3, device="emu")
        assert x.sum().item() == 3
        with pytest.raises(RuntimeError, match="is left, but not open"):
            plan.__exit__(None, None, None)
