"""`mem_get_info`: the figures are what allocations find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _spawn import Spawn

import torch_uvm

MiB = 1 << 20


@pytest.fixture(autouse=True)
def no_budget() -> None:
    torch_uvm.set_budget(None)
    torch_uvm.set_host_limit(None)
    torch_uvm.memory.empty_cache()


def fill(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Tensors until there is no memory for another one."""
    made = []
    while True:
        try:
            made.append(make())
        except torch.OutOfMemoryError:
            return made


def pinned() -> int:
    """Bytes pinned for evicted tensors; they stay pinned for later ones."""
    count: int = torch_uvm.stats()["host_bytes"]
    return count


class TestWithoutABudget:
    def test_of_a_limit(self) -> None:
        torch_uvm.set_limit(64 * MiB)
        assert torch_uvm.mem_get_info() == (64 * MiB, 64 * MiB)
        x = torch_uvm.memory.empty(12 * MiB, dtype=torch.uint8, device="emu")
        free, total = torch_uvm.mem_get_info("emu:0")
        assert total == 64 * MiB and total - free == 12 * MiB
        rest = fill(lambda: torch_uvm.memory.empty(2 * MiB, dtype=torch.uint8, device="emu"))
        assert len(rest) == free // (2 * MiB)
        assert torch_uvm.mem_get_info(0) == (0, 64 * MiB)
        del x, rest
        assert torch_uvm.mem_get_info() == (64 * MiB, 64 * MiB)  # cached segments can be used again

    def test_a_limit_below_what_is_in_use(self) -> None:
        x = torch_uvm.memory.empty(8 * MiB, dtype=torch.uint8, device="emu")
        torch_uvm.set_limit(4 * MiB)
        cached = torch_uvm.memory.memory_reserved() - x.nbytes
        assert torch_uvm.mem_get_info() == (cached, cached + x.nbytes)

    def test_tensors_that_moved_are_in_use(self) -> None:
        torch_uvm.set_limit(64 * MiB)
        x = torch_uvm.memory.empty(12 * MiB, dtype=torch.uint8, device="emu")
        y = torch_uvm.to(x, "cpu")
        assert torch_uvm.mem_get_info() == (52 * MiB, 64 * MiB) and y.nbytes == 12 * MiB

    def test_of_the_host(self) -> None:
        free, total = torch_uvm.mem_get_info()
        assert free == total  # nothing is in use
        available = torch_uvm._C.host_memory_available()
        assert abs(free - available) < 1 << 30
        assert free > torch.accelerator.get_memory_info()[1]  # memory beyond the device's 256 MiB

    def test_plain_memory_does_not_count(self) -> None:
        torch_uvm.set_limit(64 * MiB)
        x = torch.empty(16 * MiB, dtype=torch.uint8, device="emu")
        assert torch_uvm.mem_get_info() == (64 * MiB, 64 * MiB) and x.device.type == "emu"


class TestUnderABudget:
    def test_the_budget_and_the_host_limit(self) -> None:
        torch_uvm.enable(budget=16 * MiB, host_limit=32 * MiB)
        assert torch_uvm.mem_get_info() == (48 * MiB - pinned(), 48 * MiB)
        made = fill(lambda: torch.ones(2 * MiB, dtype=torch.uint8, device="emu"))
        free, total = torch_uvm.mem_get_info()
        assert total == 48 * MiB and free <= 2 * MiB
        assert len(made) * 2 * MiB >= 44 * MiB  # the rest is lost to segments
        assert pinned() > 0
        del made

    def test_a_limit_below_the_budget(self) -> None:
        torch_uvm.enable(budget=16 * MiB, host_limit=32 * MiB, limit=8 * MiB)
        assert torch_uvm.mem_get_info() == (40 * MiB - pinned(), 40 * MiB)

    def test_the_host_without_a_limit(self) -> None:
        torch_uvm.enable(budget=16 * MiB)
        free, _ = torch_uvm.mem_get_info()
        assert abs(free - 16 * MiB - torch_uvm._C.host_memory_available()) < 1 << 30


class TestArguments:
    @pytest.mark.parametrize(
        ("device", "error"),
        [("cpu", ValueError), ("emu:9", ValueError), (9, ValueError), ("cuda", ValueError), (1.5, TypeError)],
    )
    def test_other_devices(self, device: object, error: type[Exception]) -> None:
        with pytest.raises(error, match=str(device)):
            torch_uvm.mem_get_info(device)  # type: ignore[arg-type]

    def test_without_a_runtime(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            try:
                torch_uvm.mem_get_info()
            except RuntimeError as error:
                assert "TORCH_UVM_DEVICE=emu" in str(error)
            else:
                assert torch_uvm._C.backend() != "none"
            """
        )

    def test_the_current_device(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            torch_uvm.emulated.configure(devices=2)
            torch_uvm.set_limit("64MiB")
            torch_uvm.set_budget("8MiB", device=1)
            torch_uvm.set_host_limit("8MiB")
            assert torch_uvm.mem_get_info()[1] == 64 << 20
            torch.accelerator.set_device_index(1)
            assert torch_uvm.mem_get_info()[1] == 16 << 20
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )
