"""torch_uvm.allocators.arena: scope and object, tensors that outlive it, gradients, streams, threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from _idle_memory import all_memory_comes_back  # noqa: F401  (every test has it)
from _threads import in_threads
from torch import nn

import torch_uvm
from torch_uvm.allocators import Allocator

KIB, MIB = 1 << 10, 1 << 20


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, device="emu")


class TestScope:
    def test_tensors_lie_one_after_the_other(self) -> None:
        with torch_uvm.allocators.arena("1MiB") as scratch:
            x, y = ones(64), ones(64)
            assert y.data_ptr() == x.data_ptr() + 256
            assert (x + y).sum().item() == 128
            assert scratch.stats()["upstream_allocations"] == 1
            del x, y
        assert scratch.outlived == (0, 0)

    def test_the_second_iteration_makes_no_upstream_allocations(self) -> None:
        scratch = torch_uvm.allocators.arena("64KiB")
        addresses = []
        for _ in range(3):
            with scratch:
                xs = [ones(10_000) for _ in range(8)]  # more than the first block holds
                addresses.append(xs[0].data_ptr())
                del xs
        assert addresses[1] == addresses[2]
        after = scratch.stats()["upstream_allocations"]
        with scratch:
            [ones(10_000) for _ in range(8)]
        assert scratch.stats()["upstream_allocations"] == after

    def test_tensors_that_outlive_it_stay_and_are_counted(self) -> None:
        with torch_uvm.allocators.arena("64KiB") as scratch:
            kept = ones(100)
            ones(200)
        assert scratch.outlived == (1, 400)
        with scratch:
            other = torch.zeros(5000, device="emu")
            assert kept.sum().item() == 100 and other.sum().item() == 0
            del other
        assert kept.tolist() == [1] * 100
        del kept, scratch

    def test_scopes_nest(self) -> None:
        scratch = torch_uvm.allocators.arena("64KiB")
        with scratch:
            x = ones(64)
            addresses = []
            for _ in range(2):
                with scratch:
                    addresses.append(ones(64).data_ptr())
                assert scratch.outlived == (0, 0)
            assert addresses[0] == addresses[1]
            assert ones(64).data_ptr() == x.data_ptr() + 256
            assert x.sum().item() == 64
            del x

    def test_reset_within_a_scope(self) -> None:
        with torch_uvm.allocators.arena("64KiB") as scratch:
            addresses = []
            for _ in range(3):
                assert scratch.reset() == (0, 0)
                addresses.append(ones(64).data_ptr())
            assert len(set(addresses)) == 1
        assert scratch.outlived == (0, 0)

    def test_serves_one_device_only(self) -> None:
        with torch_uvm.allocators.arena("64KiB", device="cpu") as scratch:
            x = ones(8)
            assert torch_uvm.is_managed(x) and scratch.stats()["allocations"] == 0
            y = torch_uvm.memory.ones(8, device="cpu")
            assert scratch.stats()["allocations"] == 1
        with pytest.raises(ValueError, match="does not serve"):
            torch_uvm.memory.ones(8, device="emu", allocator=scratch)
        del x, y


class TestTraining:
    def test_iterations_have_the_same_bits(self) -> None:
        def train(scratch: torch_uvm.allocators.Arena | None) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to("emu")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)  # outlives the scope
            for _ in range(5):
                optimizer.zero_grad(set_to_none=False)
                batch = torch.randn(32, 64).to("emu")
                if scratch is None:
                    model(batch).square().mean().backward()
                else:
                    with scratch:
                        model(batch).square().mean().backward()
                    assert scratch.outlived == (0, 0)
                optimizer.step()
            return [p.detach().cpu() for p in model.parameters()]

        wanted = train(None)
        scratch = torch_uvm.allocators.arena("256KiB")
        assert all(torch.equal(a, b) for a, b in zip(train(scratch), wanted, strict=True))
        assert scratch.stats()["upstream_allocations"] <= 3

    def test_gradients_outlive_it(self) -> None:
        x = torch.randn(64, 64).to("emu").requires_grad_()
        with torch_uvm.allocators.arena("1MiB") as scratch:
            (x @ x).square().sum().backward()
        assert scratch.outlived.allocations == 1 and x.grad is not None
        x.grad = None


class TestSharing:
    def test_streams_have_blocks_of_their_own(self) -> None:
        scratch = torch_uvm.allocators.arena("64KiB")
        stream = torch.Stream("emu")
        with scratch:
            x = ones(64)
            with stream:
                y = ones(64)
            assert abs(y.data_ptr() - x.data_ptr()) >= 256
            assert scratch.stats()["upstream_allocations"] == 2
            x.record_stream(stream)
            del x, y
        assert scratch.outlived == (0, 0)

    def test_threads_share_it_by_use_allocator(self) -> None:
        scratch = torch_uvm.allocators.arena("64KiB")
        wrong: list[float] = []

        def work(number: int) -> None:
            with torch_uvm.allocators.use_allocator(scratch):
                for _ in range(50):
                    x = torch.full((333,), float(number), device="emu")
                    y = x * 2
                    if y.sum().item() != 666.0 * number:
                        wrong.append(number)

        in_threads(*(partial(work, number) for number in range(4)))
        assert not wrong and scratch.reset() == (0, 0)

    def test_nested_in_other_allocators(self) -> None:
        pool = Allocator.pool("1MiB").with_statistics()
        scratch = torch_uvm.allocators.arena("64KiB", upstream=pool)
        assert "arena" in repr(scratch) and "pool" in repr(scratch)
        with scratch:
            x = ones(1000)
            assert pool.passed()["bytes"] >= 64 * KIB
            del x
        assert scratch.release() >= 64 * KIB
        assert pool.passed()["bytes"] == 0


class TestArguments:
    def test_invalid_arguments_are_refused(self) -> None:
        with pytest.raises(ValueError, match="initial"):
            torch_uvm.allocators.arena("many")
        with pytest.raises((ValueError, RuntimeError), match=r"cuda|device|accepted"):
            torch_uvm.allocators.arena(device="meta")
        scratch = torch_uvm.allocators.arena("1KiB")
        with pytest.raises(RuntimeError, match="is left, but not open"):
            scratch.__exit__(None, None, None)

    def test_beyond_the_limit(self) -> None:
        scratch = torch_uvm.allocators.arena("64KiB", upstream=Allocator.process().with_limit("1MiB"))
        with scratch, pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * MIB, dtype=torch.uint8, device="emu")
        with scratch:
            assert ones(10).sum().item() == 10
