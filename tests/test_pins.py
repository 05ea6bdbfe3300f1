"""Pins without room, and beside other threads: `keep_resident`, `resident`, exports."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import torch

import torch_uvm

MIB = 1024**2


@pytest.fixture(autouse=True)
def budget() -> None:
    """A hard budget of 24 MiB: room for one tensor of `large`, not for two."""
    torch_uvm.memory.empty_cache()
    torch_uvm.enable(budget=24 * MIB)
    torch_uvm.memory.empty_cache()


def large(value: float) -> torch.Tensor:
    """16 MiB."""
    return torch.full((4 * MIB,), value, dtype=torch.float32, device="emu")


def is_on_device(x: torch.Tensor) -> bool:
    return torch_uvm.residency(x) == {torch.device("emu:0"): x.untyped_storage().nbytes()}


class TestNoRoom:
    def test_a_second_pin_raises_and_the_first_holds(self) -> None:
        first, second = large(1), large(2)
        with torch_uvm.resident(first):
            address = first.data_ptr()
            with pytest.raises(torch.OutOfMemoryError, match="no room to keep 16.00 MiB.*24.00 MiB"):
                torch_uvm.keep_resident(second)
            assert second.sum().item() == 2 * second.numel()  # used on the host
            assert first.data_ptr() == address and is_on_device(first)
        kept = torch_uvm.keep_resident(second)
        assert is_on_device(second)
        kept.release()

    def test_the_error_names_what_cannot_be_evicted(self) -> None:
        small = [torch.ones(50_000, device="emu") for _ in range(60)]  # 11 MiB, below `relocation_min`
        with pytest.raises(torch.OutOfMemoryError, match=" 0 B are pinned there .* small storages,"):
            torch_uvm.keep_resident(large(1))
        del small
        torch_uvm.keep_resident(large(1)).release()

    def test_a_small_tensor_that_was_created_on_the_host_does_not_move_either(self) -> None:
        large_ones = [large(1), torch.ones(MIB, device="emu")]
        kept = torch_uvm.keep_resident(large_ones)
        small = [torch.ones(50_000, device="emu")]
        while is_on_device(small[-1]):
            small.append(torch.ones(50_000, device="emu"))
        x = small[-1]
        del large_ones
        kept.release()
        with torch_uvm.resident(x):
            address = x.data_ptr()
            assert is_on_device(x)
            for _ in range(4):
                large(1)
                x.add_(1)
            assert x.data_ptr() == address

    def test_a_scope_that_fails_is_not_open(self) -> None:
        first, second = large(1), large(2)
        scope = torch_uvm.resident([first, second])
        with pytest.raises(torch.OutOfMemoryError), scope:
            pytest.fail("entered")
        with pytest.raises(RuntimeError, match="not open"):
            scope.__exit__(None, None, None)
        for each in (first, second):  # neither is pinned
            torch_uvm.keep_resident(each).release()

    def test_an_export_raises_and_can_be_retried(self) -> None:
        first, second = large(1), large(2)
        with torch_uvm.resident(first), pytest.raises(torch.OutOfMemoryError, match="no room to keep"):
            second.__dlpack__()
        exported = second.__dlpack__()
        assert is_on_device(second)
        address = second.data_ptr()
        for _ in range(4):
            torch.ones(MIB, device="emu").add_(1)  # 4 MiB each
        assert second.data_ptr() == address
        del exported

    def test_writes_through_a_pinned_address_are_not_lost(self) -> None:
        first, second = large(1), large(2)
        with torch_uvm.resident(first):
            address = first.data_ptr()
            with pytest.raises(torch.OutOfMemoryError):
                torch_uvm.keep_resident(second)
            view = np.ctypeslib.as_array((ctypes.c_float * first.numel()).from_address(address))
            view[:] = 7
            second.add_(1)
        second.mul_(2)
        assert (first == 7).all().item()
        assert (second == 6).all().item()


class TestOtherThreads:
    def test_pins_beside_operators_that_use_the_tensors_on_the_host(self) -> None:
        """Every pin either keeps its tensor on the device or raises, regardless of the other thread."""
        tensors = [large(1), large(2), large(3)]
        stop = threading.Event()
        failures: list[BaseException] = []

        def use() -> None:
            try:
                while not stop.is_set():
                    for number, tensor in enumerate(tensors):
                        assert tensor[:: MIB // 2].eq(number + 1).all().item()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        try:
            held = 0
            for number in range(60):
                tensor = tensors[number % 3]
                try:
                    with torch_uvm.resident(tensor):
                        address = tensor.data_ptr()
                        assert is_on_device(tensor)
                        tensor.sum()
                        assert tensor.data_ptr() == address
                        held += 1
                except torch.OutOfMemoryError:
                    pass
            assert held > 0
        finally:
            stop.set()
            thread.join()
        assert failures == []


class TestResize:
    """`resize_` of a storage copies its bytes without an operator."""

    @pytest.mark.parametrize("evicted", [True, False])
    def test_keeps_the_bytes(self, evicted: bool) -> None:
        x = torch.arange(2 * MIB, dtype=torch.float32, device="emu")
        if evicted:
            with torch_uvm.resident(large(1)):  # 16 of 24 MiB
                torch.ones(3 * MIB // 2, device="emu").add_(1)  # in the place of x
            assert not is_on_device(x)
        storage = x.untyped_storage()
        storage.resize_(12 * MIB)
        others = [torch.zeros(MIB, device="emu") for _ in range(8)]
        for other in others:
            other.add_(1)
        assert storage.nbytes() == 12 * MIB
        assert torch.equal(x.cpu(), torch.arange(2 * MIB, dtype=torch.float32))

    def test_of_more_than_the_budget(self) -> None:
        x = torch.arange(8 * MIB, dtype=torch.float32, device="emu")  # 32 of 24 MiB
        x.untyped_storage().resize_(36 * MIB)
        assert torch.equal(x.cpu(), torch.arange(8 * MIB, dtype=torch.float32))

    def test_a_pin_ends_whatever_is_relocated_by_then(self) -> None:
        x = torch.ones(MIB, device="emu")
        kept = torch_uvm.keep_resident(x)
        try:
            torch_uvm._C.set_option("relocation_min", "8MiB")
            kept.release()
        finally:
            torch_uvm._C.set_option("relocation_min", "256KiB")
        others = [torch.zeros(MIB, device="emu") for _ in range(8)]
        for other in 2 * others:
            other.add_(1)
        assert not is_on_device(x)
