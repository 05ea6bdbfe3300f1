"""The waits of a move: their exact number, and programs under schedules of delayed work."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from _schedules import across_seeds
from _spawn import Spawn

import torch_uvm

emu: Any = torch.get_device_module("emu")
EMU = torch.device("emu:0")

# A copy from a pinned buffer to the device stays queued until a wait for it, or a random moment.
QUEUE = """
            n = 1 << 16
            ones = torch.ones(n).pin_memory()

            def counts():
                c = torch_uvm.emulated.counters()
                return c["synchronisations"], c["event_records"]

            def during(call):
                before = counts()
                result = call()
                return tuple(b - a for a, b in zip(before, counts())), result

            def pending():
                return torch_uvm._C.emu_pending_operations() > 0
"""


def _with_queue(code: str) -> str:
    return QUEUE + code


def _waits(call: Any) -> tuple[int, int]:
    before = torch_uvm.emulated.counters()
    call()
    after = torch_uvm.emulated.counters()
    return tuple(after[key] - before[key] for key in ("synchronisations", "event_records"))  # type: ignore[return-value]


class TestCounts:
    """Waits of the host, and events, per move."""

    def test_idle_moves_wait_for_nothing(self) -> None:
        x = torch_uvm.memory.zeros(1 << 16)
        on_cpu = torch_uvm.memory.zeros(1 << 16, device="cpu")
        emu.synchronize()
        assert _waits(lambda: torch_uvm.to(x, "cpu")) == (0, 0)
        assert _waits(lambda: torch_uvm.to(on_cpu, "emu")) == (0, 0)
        assert _waits(lambda: torch_uvm.to(torch_uvm.memory.zeros(0), "cpu")) == (0, 0)

    def test_to_the_cpu_waits_once_per_busy_stream(self, spawn: Spawn) -> None:
        """One event per stream with pending work: the current one, an earlier user, and a recorded one."""
        wrong = across_seeds(
            spawn,
            _with_queue(
                """
            wrong = 0
            for non_blocking in (False, True):
                x = torch_uvm.memory.zeros(n)
                x.copy_(ones, non_blocking=True)
                busy = int(pending())
                count, y = during(lambda: torch_uvm.to(x, "cpu", non_blocking=non_blocking))
                wrong |= count != ((0, 0) if non_blocking else (busy, busy))
                emu.synchronize()

                a, b = torch.Stream("emu"), torch.Stream("emu")
                x = torch_uvm.memory.zeros(n)
                emu.synchronize()
                busy = 0
                for stream in (a, b):
                    with stream:
                        x.copy_(ones, non_blocking=True)
                    x.record_stream(stream)
                    busy += not stream.query()
                # A query may complete a stream's work, so only streams that are still busy count.
                count, y = during(lambda: torch_uvm.to(x, "cpu", non_blocking=non_blocking))
                wrong |= 2 * (count[0] != count[1] or count[0] > busy or (non_blocking and count != (0, 0)))
                wrong |= 4 * (not non_blocking and not y.eq(1).all().item())
                emu.synchronize()
            return int(wrong)
            """
            ),
        )
        assert wrong == 0

    def test_to_a_device_does_not_block_the_host(self, spawn: Spawn) -> None:
        """The device's stream waits for a busy stream by an event."""
        wrong = across_seeds(
            spawn,
            _with_queue(
                """
            x = torch_uvm.memory.zeros(n)
            x.copy_(ones, non_blocking=True)
            y = torch_uvm.to(x, "cpu", non_blocking=True)
            other = torch.Stream("emu")
            busy = int(pending())
            with other:
                count, z = during(lambda: torch_uvm.to(y, "emu"))
                wrong = count != (0, busy)
                return int(wrong | 2 * (not z.eq(1).all().item()))
            """
            ),
        )
        assert wrong == 0

    def test_of_a_module_waits_once(self, spawn: Spawn) -> None:
        wrong = across_seeds(
            spawn,
            _with_queue(
                """
            layer = torch_uvm.to(torch.nn.Linear(64, 64), "emu", managed=True)
            source = torch.ones(64, 64).pin_memory()
            with torch.no_grad():
                layer.weight.copy_(source, non_blocking=True)
            busy = int(pending())
            count, _ = during(lambda: torch_uvm.to(layer, "cpu"))
            return int(count != (busy, busy)) | 2 * (not layer.weight.eq(1).all().item())
            """
            ),
        )
        assert wrong == 0


class TestSchedules:
    """The wrong program must fail under some schedule, the right one under none."""

    def test_to_the_cpu(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            _with_queue(
                """
            def read(non_blocking, wait):
                x = torch_uvm.memory.zeros(n)
                x.copy_(ones, non_blocking=True)
                y = torch_uvm.to(x, "cpu", non_blocking=non_blocking)
                if wait:
                    emu.current_stream().synchronize()
                right = y.eq(1).all().item()
                emu.synchronize()
                return right

            programs = [(True, False), (True, True), (False, False)]
            return sum((not all(read(*p) for _ in range(4))) << i for i, p in enumerate(programs))
            """
            ),
        )
        assert flags == 0b001

    def test_after_work_on_a_side_stream(self, spawn: Spawn) -> None:
        """The side stream must be recorded by record_stream, or be ordered before the current stream."""
        flags = across_seeds(
            spawn,
            _with_queue(
                """
            def read(how):
                x = torch_uvm.memory.zeros(n)
                emu.synchronize()
                side = torch.Stream("emu")
                where = emu.current_stream()
                with side:
                    x.copy_(ones, non_blocking=True)
                if how == 1:
                    x.record_stream(side)
                if how == 2:
                    where.wait_stream(side)
                right = torch_uvm.to(x, "cpu").eq(1).all().item()
                emu.synchronize()
                return right
            return sum((not all(read(how) for _ in range(4))) << how for how in (1, 2))
            """
            ),
        )
        assert flags == 0

    def test_unrecorded_side_stream(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            _with_queue(
                """
            def read(record):
                x = torch_uvm.memory.zeros(n)
                emu.synchronize()
                side = torch.Stream("emu")
                with side:
                    x.copy_(ones, non_blocking=True)
                if record:
                    x.record_stream(side)
                right = torch_uvm.to(x, "cpu").eq(1).all().item()
                emu.synchronize()
                return right
            return sum((not all(read(record) for _ in range(4))) << record for record in (False, True))
            """
            ),
        )
        assert flags == 0b01

    def test_between_devices(self, spawn: Spawn) -> None:
        """Ordered after the source's current stream. Other streams of the source must be recorded."""
        flags = across_seeds(
            spawn,
            _with_queue(
                """
            def read(how):
                host = torch.zeros(n).pin_memory()
                x = torch_uvm.memory.zeros(n, device="emu:0")
                emu.synchronize(0)
                side = torch.Stream("emu:0")
                with side if how else emu.stream(None):
                    x.copy_(ones, non_blocking=True)
                if how == 2:
                    x.record_stream(side)
                y = torch_uvm.to(x, "emu:1")
                host.copy_(y, non_blocking=True)
                emu.synchronize(1)
                right = host.eq(1).all().item()
                emu.synchronize(0)
                return right
            return sum((not all(read(how) for _ in range(4))) << how for how in (0, 1, 2))
            """
            ),
            devices=2,
        )
        assert flags == 0b010

    def test_of_a_small_view(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            _with_queue(
                """
            def read(wait):
                x = torch_uvm.memory.zeros(n)
                x.copy_(ones, non_blocking=True)
                right = torch_uvm.to(x[100:104], "cpu", non_blocking=not wait).tolist() == [1.0] * 4
                emu.synchronize()
                return right
            return sum((not all(read(wait) for _ in range(4))) << wait for wait in (False, True))
            """
            ),
        )
        assert flags == 0b01

    def test_and_back_again(self, spawn: Spawn) -> None:
        """Work that a move to the CPU did not wait for still orders the following moves."""
        flags = across_seeds(
            spawn,
            _with_queue(
                """
            def read():
                x = torch_uvm.memory.zeros(n)
                x.copy_(ones, non_blocking=True)
                y = torch_uvm.to(x, "cpu", non_blocking=True)
                with torch.Stream("emu"):
                    z = torch_uvm.to(y, "emu")
                    right = z.eq(1).all().item()
                    z.add_(1)
                    right = right and torch_uvm.to(z, "cpu").eq(2).all().item()
                emu.synchronize()
                return right
            return int(not all(read() for _ in range(4)))
            """
            ),
        )
        assert flags == 0

    def test_copies_keep_the_meaning_of_non_blocking(self, spawn: Spawn) -> None:
        """A managed copy to the CPU waits unless it is non_blocking: its destination may be written later."""
        flags = across_seeds(
            spawn,
            _with_queue(
                """
            def read(value, non_blocking):
                there = torch.full((n,), float(value), device="emu")
                y = there.to("cpu", managed=True, non_blocking=non_blocking)
                right = y.eq(value).all().item()
                emu.synchronize()
                assert y.eq(value).all().item()
                return right
            return sum((not all(read(i + 1, nb) for i in range(4))) << nb for nb in (False, True))
            """
            ),
        )
        assert flags == 0b10


class TestNeighbours:
    """A move prefetches the pages that belong to the tensor alone."""

    @pytest.fixture(autouse=True)
    def fresh_memory(self) -> None:
        gc.collect()
        torch_uvm.memory.empty_cache()

    def made_on_the_host(self, size: int) -> torch.Tensor:
        x = torch_uvm.memory.zeros(size, dtype=torch.uint8, device="cpu")
        assert torch_uvm.emulated.residency(x).get(EMU, 0) == 0
        return x

    @pytest.mark.parametrize("size", [256, 4096, 100_000])
    def test_of_small_tensors(self, size: int) -> None:
        tensors = [self.made_on_the_host(size) for _ in range(3)]
        page = torch_uvm._C.device_properties(0)["page_bytes"]
        if size < page // 4:
            assert len({t.data_ptr() // page for t in tensors}) < 3, "some share a page"
        torch_uvm.to(tensors[1], "emu")
        emu.synchronize()
        for neighbour in (tensors[0], tensors[2]):
            assert torch_uvm.emulated.residency(neighbour).get(EMU, 0) == 0

    def test_of_a_view(self) -> None:
        page = torch_uvm._C.device_properties(0)["page_bytes"]
        x = self.made_on_the_host(8 * page)
        start = -x.data_ptr() % page + page // 2  # in the middle of a page
        torch_uvm.to(x[start : start + 3 * page], "emu")
        emu.synchronize()
        assert torch_uvm.emulated.residency(x)[EMU] == 2 * page


def test_waiting_for_a_device_that_only_managed_tensors_used(spawn: Spawn) -> None:
    """PyTorch starts devices lazily, and does not synchronise devices that it has not started."""
    code = """
        import torch, torch_uvm
        torch_uvm.emulated.configure(seed=SEED)
        source = torch.ones(1 << 16).pin_memory()
        x = MAKE
        x.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        print(torch_uvm._C.emu_pending_operations())
        """
    for make in (
        "torch_uvm.memory.zeros(1 << 16)",
        "torch_uvm.to(torch.zeros(1 << 16), 'emu', managed=True)",
    ):
        done = [spawn(code.replace("MAKE", make).replace("SEED", seed)).stdout for seed in ("1", "2")]
        assert done == ["0\n", "0\n"]
