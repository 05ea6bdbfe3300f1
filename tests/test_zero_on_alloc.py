"""The option zero_on_alloc: new managed tensors contain zeros, never the bytes of an earlier tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from _idle_memory import all_memory_comes_back  # noqa: F401  (every test has it)
from _schedules import across_seeds
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C, emulated

SIZES = (100, 70_000, 3 << 20)  # of bytes: small, shared and large blocks


@pytest.fixture
def zeroed() -> Iterator[None]:
    _C.set_option("zero_on_alloc", "1")
    yield
    _C.set_option("zero_on_alloc", "0")


def _used(size: int, device: str) -> int:
    """Leaves a free block full of 7s. Returns its address."""
    x = torch_uvm.memory.empty(size, dtype=torch.uint8, device=device).fill_(7)
    return x.data_ptr()


class TestBlocks:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("device", ["emu", "cpu"])
    def test_a_block_used_before_holds_no_old_bytes(self, size: int, device: str, zeroed: None) -> None:
        addresses = {_used(size, device) for _ in range(3)}
        x = torch_uvm.memory.empty(size, dtype=torch.uint8, device=device)
        assert x.data_ptr() in addresses  # otherwise nothing is tested
        assert x.count_nonzero().item() == 0

    @pytest.mark.parametrize("size", SIZES)
    def test_while_off_a_reused_block_is_not_written(self, size: int) -> None:
        address = _used(size, "emu")
        calls = emulated.counters()["zero_calls"]
        x = torch_uvm.memory.empty(size, dtype=torch.uint8, device="emu")
        assert x.data_ptr() == address
        assert x.eq(7).all().item()
        assert emulated.counters()["zero_calls"] == calls

    def test_one_call_an_allocation(self, zeroed: None) -> None:
        calls = emulated.counters()["zero_calls"]
        kept = [torch_uvm.memory.empty(1000, device="emu") for _ in range(5)]
        torch_uvm.memory.empty(0, device="emu")
        assert emulated.counters()["zero_calls"] == calls + len(kept)

    def test_results_of_operators(self, zeroed: None) -> None:
        with torch_uvm.enabled():
            address = torch.full((1 << 20,), 7.0, device="emu").data_ptr()
            x = torch.empty(1 << 20, device="emu")
            assert x.data_ptr() == address and x.count_nonzero().item() == 0
            assert torch.equal((x + 1).cpu(), torch.ones(1 << 20))

    def test_bytes_added_by_resize(self, zeroed: None) -> None:
        x = torch_uvm.memory.ones(10, device="emu")
        big = torch_uvm.memory.full((1 << 16,), 7.0, device="emu")
        del big
        with torch_uvm.enabled():
            x.resize_(1 << 16)
        assert x.sum().item() == 10

    def test_cpu_tensors_that_are_managed(self, zeroed: None) -> None:
        torch_uvm.enable(host_tensors=True)
        torch.full((1 << 20,), 7.0)
        x = torch.empty(1 << 20)
        assert torch_uvm.is_managed(x) and x.count_nonzero().item() == 0

    def test_a_block_that_another_stream_used(self, zeroed: None) -> None:
        side = torch.Stream(device="emu")
        with side:
            _used(1 << 20, "emu")
        x = torch_uvm.memory.empty(1 << 20, dtype=torch.uint8, device="emu")
        assert x.count_nonzero().item() == 0

    def test_under_a_budget(self, zeroed: None) -> None:
        torch_uvm.enable(budget="16MiB")
        kept = []
        for number in range(12):  # 48 MiB: most of it is evicted
            x = torch.empty(1 << 20, device="emu")
            assert x.count_nonzero().item() == 0
            kept.append(x.fill_(number))
        for number, x in enumerate(kept):
            assert x.eq(number).all().item()
        kept.clear()


def _plan() -> AbstractContextManager[object]:
    return torch_uvm.allocators.allocation_plan("zeroed")


ALLOCATORS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "arena": lambda: torch_uvm.allocators.arena("8MiB"),
    "plan": _plan,
    "nothing": nullcontext,
}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_in_every_allocators_scope(name: str, zeroed: None) -> None:
    scope = ALLOCATORS[name]()
    addresses = []
    for _ in range(4):
        with scope, torch_uvm.enabled():
            x = torch.empty(1 << 18, device="emu")
            assert x.count_nonzero().item() == 0
            addresses.append(x.data_ptr())
            x.fill_(7)
            del x
    assert len(set(addresses)) < 4


@pytest.mark.parametrize("allocator", ["caching", "pool"])
def test_by_allocator(allocator: str, zeroed: None) -> None:
    made = getattr(torch_uvm.allocators.Allocator, allocator)()
    address = torch_uvm.memory.empty(1 << 18, device="emu", allocator=made).fill_(7).data_ptr()
    x = torch_uvm.memory.empty(1 << 18, device="emu", allocator=made)
    assert x.data_ptr() == address and x.count_nonzero().item() == 0


class TestOrder:
    def test_zeros_come_before_later_work_of_the_stream(self, spawn: Spawn) -> None:
        wrong = across_seeds(
            spawn,
            """
            torch_uvm._C.set_option("zero_on_alloc", "1")
            source = torch.ones(1 << 18).pin_memory()
            flags = 0
            for _ in range(5):
                x = torch_uvm.memory.empty(1 << 18, device="emu")
                x.copy_(source, non_blocking=True)
                y = torch_uvm.memory.empty(1 << 18, device="emu")
                flags |= int(x.sum().item() != 1 << 18) | int(y.count_nonzero().item() != 0)
                del x, y
            return flags
            """,
        )
        assert wrong == 0

    def test_the_host_waits_before_it_zeroes(self, spawn: Spawn) -> None:
        """A delayed copy still writes a block that goes to a CPU tensor. The zeros must come last."""
        wrong = across_seeds(
            spawn,
            """
            torch_uvm._C.set_option("zero_on_alloc", "1")
            source = torch.full((1 << 18,), 7.0).pin_memory()
            flags = 0
            for _ in range(5):
                x = torch_uvm.memory.empty(1 << 18, device="emu")
                x.copy_(source, non_blocking=True)
                x = torch_uvm.to(x, "cpu", non_blocking=True)
                del x
                y = torch_uvm.memory.empty(1 << 18, device="cpu")
                emu.synchronize()
                flags |= int(y.count_nonzero().item() != 0)
                del y
            return flags
            """,
        )
        assert wrong == 0


def test_by_the_environment(spawn: Spawn) -> None:
    done = spawn(
        """
        import torch, torch_uvm
        torch_uvm.memory.empty(1000, device="emu").fill_(7)
        print(torch_uvm.memory.empty(1000, device="emu").count_nonzero().item())
        """,
        env={"TORCH_UVM_CONF": "zero_on_alloc:1", "TORCH_UVM_DEVICE": "emu"},
    )
    assert done.stdout.split() == ["0"]


def test_memory_is_freed_if_zeroing_fails(zeroed: None) -> None:
    allocated = torch_uvm.memory.memory_allocated()
    _C.emu_fail_call("zero_async", 1)
    try:
        with pytest.raises(RuntimeError, match="zero_async"):
            torch_uvm.memory.empty(1 << 18, device="emu")
    finally:
        _C.emu_clear_failures()
    assert torch_uvm.memory.memory_allocated() == allocated
    assert torch_uvm.memory.empty(1 << 18, device="emu").count_nonzero().item() == 0
