"""Streams and events of the emulated accelerator, and errors of programs that omit them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _schedules import across_seeds
from _spawn import Spawn

from torch_uvm import _C, emulated

emu: Any = torch.get_device_module("emu")
MIB = 1024**2


class TestStream:
    def test_belongs_to_its_device(self) -> None:
        for stream in (torch.Stream("emu"), torch.Stream(device="emu:0"), emu.Stream(), emu.Stream("emu:0")):
            assert stream.device == torch.device("emu", 0)
            assert isinstance(stream, torch.Stream)
        assert isinstance(emu.Stream(), emu.Stream)

    def test_are_different(self) -> None:
        a, b = torch.Stream("emu"), torch.Stream("emu", priority=-1)
        assert len({a, b, emu.default_stream()}) == 3
        again = torch.Stream(stream_id=a.stream_id, device_index=a.device_index, device_type=a.device_type)
        assert again == a and hash(again) == hash(a)

    def test_contexts_nest_and_end(self) -> None:
        a, b = torch.Stream("emu"), emu.Stream()
        default = emu.default_stream()
        assert emu.current_stream() == default
        with a:
            assert torch.accelerator.current_stream() == a
            with emu.stream(b), emu.stream(None):
                assert emu.current_stream() == b
            assert emu.current_stream() == a
        assert emu.current_stream() == default
        with pytest.raises(KeyError), b:
            raise KeyError
        assert emu.current_stream() == default

    def test_set_stream(self) -> None:
        a = torch.Stream("emu")
        try:
            emu.set_stream(a)
            assert emu.current_stream() == a
            torch.accelerator.set_stream(emu.default_stream())
            assert emu.current_stream() == emu.default_stream()
        finally:
            emu.set_stream(emu.default_stream())

    def test_synchronize_waits_for_its_copies(self) -> None:
        host, there = torch.ones(8 * MIB).pin_memory(), torch.zeros(8 * MIB, device="emu")
        emu.synchronize()
        back = torch.zeros(8 * MIB).pin_memory()
        stream = torch.Stream("emu")
        with stream:
            there.copy_(host, non_blocking=True)
            back.copy_(there, non_blocking=True)
        stream.synchronize()
        assert stream.query() and torch.equal(back, host)

    def test_waits_for_another(self) -> None:
        host, there = torch.ones(8 * MIB).pin_memory(), torch.zeros(8 * MIB, device="emu")
        emu.synchronize()
        stream = torch.Stream("emu")
        with stream:
            there.copy_(host, non_blocking=True)
        emu.current_stream().wait_stream(stream)
        assert bool((there == 1).all())

    def test_the_pool_is_bounded(self) -> None:
        assert len({torch.Stream("emu").stream_id for _ in range(200)}) <= 32

    def test_each_has_a_modelled_clock(self) -> None:
        """Copies on two streams overlap in modelled time if their directions are opposite."""
        here, back = torch.ones(8 * MIB).pin_memory(), torch.zeros(8 * MIB).pin_memory()
        there, other = torch.zeros(8 * MIB, device="emu"), torch.ones(8 * MIB, device="emu")

        def run(up: torch.Stream, down: torch.Stream) -> float:
            emu.synchronize()
            before = emulated.time_us()
            with up:
                there.copy_(here, non_blocking=True)
            with down:
                back.copy_(other, non_blocking=True)
            emu.synchronize()
            return emulated.time_us() - before

        a, b = torch.Stream("emu"), torch.Stream("emu")
        assert run(a, b) < 0.6 * run(a, a)


class TestEvent:
    def test_is_reached_once_recorded_work_is_done(self) -> None:
        event = torch.Event("emu")
        assert event.query(), "an event that was never recorded counts as reached"
        event.synchronize()
        host, there = torch.ones(4 * MIB).pin_memory(), torch.zeros(4 * MIB, device="emu")
        there.copy_(host, non_blocking=True)
        event.record()
        event.synchronize()
        assert event.query() and emu.current_stream().query()

    def test_a_stream_waits_for_it(self) -> None:
        stream = torch.Stream("emu")
        host, there = torch.ones(8 * MIB).pin_memory(), torch.zeros(8 * MIB, device="emu")
        emu.synchronize()
        with stream:
            there.copy_(host, non_blocking=True)
        event = stream.record_event()
        emu.current_stream().wait_event(event)
        assert bool((there == 1).all())
        event.wait(torch.Stream("emu"))

    def test_kinds_mix(self) -> None:
        """Events and streams of torch.emu work in all of PyTorch's functions."""
        event, other = emu.Event(enable_timing=True), torch.Event("emu", enable_timing=True)
        stream = emu.Stream()
        for each in (event, other):
            assert isinstance(each, emu.Event) and isinstance(each, torch.Event)
            torch.Stream("emu").record_event(each)
            stream.record_event(each)
            stream.wait_event(each)
            each.record(stream)
            each.wait(stream)
        assert event.elapsed_time(other) >= 0 and other.elapsed_time(event) <= 0
        assert not isinstance(stream, emu.Event)

    @pytest.mark.parametrize(
        "make", [lambda: torch.Event("emu", enable_timing=True), lambda: emu.Event(True)]
    )
    def test_elapsed_time_is_modelled(self, make: Callable[[], torch.Event]) -> None:
        x = torch.ones(MIB, device="emu")
        begin, middle, end = make(), make(), make()
        begin.record()
        x.add_(1)
        middle.record()
        for _ in range(100):
            x.add_(1)
        end.record()
        end.synchronize()
        assert 0 < begin.elapsed_time(middle) < begin.elapsed_time(end) / 50
        assert begin.elapsed_time(end) == pytest.approx(
            begin.elapsed_time(middle) + middle.elapsed_time(end), rel=1e-3
        )

    def test_elapsed_time_needs_timing(self) -> None:
        plain, timed = torch.Event("emu"), emu.Event(enable_timing=True)
        plain.record()
        timed.record()
        with pytest.raises(ValueError, match="enable_timing=True"):
            timed.elapsed_time(plain)
        with pytest.raises(ValueError, match="recorded"):
            timed.elapsed_time(emu.Event(enable_timing=True))

    def test_can_be_recorded_again(self) -> None:
        event = torch.Event("emu", enable_timing=True)
        start = emu.Event(enable_timing=True)
        start.record()
        event.record()
        first = start.elapsed_time(event)
        torch.ones(MIB, device="emu").add_(1)
        event.record()
        assert start.elapsed_time(event) > first

    def test_interprocess_is_refused(self) -> None:
        with pytest.raises(NotImplementedError, match="interprocess=True"):
            emu.Event(interprocess=True)

    def test_records_are_counted(self) -> None:
        before = emulated.counters()["event_records"]
        torch.Event("emu").record()
        assert emulated.counters()["event_records"] == before + 1


class TestDelayedWork:
    """Under a seeded schedule, a queued copy runs when a wait for it occurs, or at a random moment."""

    def test_reading_the_host_side_too_early(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            """
            there = torch.ones(1 << 16, device="emu")
            hosts = [torch.zeros(1 << 16).pin_memory() for _ in range(5)]
            for host in hosts:
                host.copy_(there, non_blocking=True)
            early = [host.eq(1).all().item() for host in hosts]
            emu.current_stream().synchronize()
            late = [host.eq(1).all().item() for host in hosts]
            return (not all(early)) | (not all(late)) << 1
            """,
        )
        assert flags == 0b01, "wrong without synchronisation, right with it"

    def test_overwriting_the_host_side_too_early(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            """
            def send(wait):
                host, there = torch.ones(1 << 16).pin_memory(), torch.zeros(1 << 16, device="emu")
                there.copy_(host, non_blocking=True)
                if wait:
                    emu.synchronize()
                host.fill_(7)
                return there.eq(1).all().item()
            return (not all(send(False) for _ in range(5))) | (not all(send(True) for _ in range(5))) << 1
            """,
        )
        assert flags == 0b01

    def test_queued_copies_come_before_a_resize(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            """
            host = torch.ones(1 << 16).pin_memory()
            wrong = 0
            for _ in range(5):
                there = torch.zeros(1 << 16, device="emu")
                there.copy_(host, non_blocking=True)
                there.resize_(1 << 18)
                wrong |= int(there[: 1 << 16].sum().item() != 1 << 16)
            return wrong
            """,
        )
        assert flags == 0

    def test_reading_on_another_stream(self, spawn: Spawn) -> None:
        """Four variants: no wait, a stream's wait, an event's wait, and reading on the copy's stream."""
        flags = across_seeds(
            spawn,
            """
            def read(order):
                host, there = torch.ones(1 << 16).pin_memory(), torch.zeros(1 << 16, device="emu")
                emu.synchronize()
                stream = torch.Stream("emu")
                with stream:
                    there.copy_(host, non_blocking=True)
                    if order == 3:
                        return there.eq(1).all().item()
                if order == 1:
                    emu.current_stream().wait_stream(stream)
                if order == 2:
                    emu.current_stream().wait_event(stream.record_event())
                right = there.eq(1).all().item()
                emu.synchronize()
                return right and there.eq(1).all().item()
            return sum((not all(read(order) for _ in range(4))) << order for order in range(4))
            """,
        )
        assert flags == 0b0001

    def test_freeing_memory_that_another_stream_uses(self, spawn: Spawn) -> None:
        """Without record_stream, the next tensor gets the memory while it is still being read."""
        flags = across_seeds(
            spawn,
            """
            def lend(record):
                x, host = torch.ones(1 << 18, device="emu"), torch.zeros(1 << 18).pin_memory()
                emu.synchronize()
                stream = torch.Stream("emu")
                where = x.data_ptr()
                with stream:
                    host.copy_(x, non_blocking=True)
                if record:
                    x.record_stream(stream)
                del x
                y = torch.full((1 << 18,), 7.0, device="emu")
                emu.synchronize()
                return host.eq(1).all().item()
            both = []
            for managed in (False, True):
                with torch_uvm.enabled() if managed else torch_uvm.disabled():
                    both += [all(lend(record) for _ in range(4)) for record in (False, True)]
            return sum((not right) << place for place, right in enumerate(both))
            """,
        )
        assert flags == 0b0101, "overwritten without record_stream, right with it"

    def test_plain_copies_wait_by_themselves(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            """
            x = torch.arange(1 << 14).float()
            wrong = 0
            for host in (x, x.pin_memory()):
                for non_blocking in (False, True):
                    if non_blocking and host.is_pinned():
                        continue  # in these cases the caller must wait
                    there = host.to("emu", non_blocking=non_blocking)
                    with torch.Stream("emu"):
                        wrong |= not torch.equal(there.cpu(), x)
                    back = torch.empty_like(host, pin_memory=host.is_pinned())
                    wrong |= 2 * (not torch.equal(back.copy_(there), x))
                    wrong |= 4 * (there[5].item() != 5 or there.tolist()[7] != 7)
            return int(wrong)
            """,
        )
        assert flags == 0

    def test_autograd_follows_the_streams_of_forward(self, spawn: Spawn) -> None:
        flags = across_seeds(
            spawn,
            """
            torch.manual_seed(0)
            data, weight = torch.rand(64, 64), torch.rand(64, 64)
            expected = weight.clone().requires_grad_()
            (data @ expected).square().sum().backward()
            ours = weight.to("emu").requires_grad_()
            stream = torch.Stream("emu")
            emu.synchronize()
            with stream:
                there = data.pin_memory().to("emu", non_blocking=True)
                loss = (there @ ours).square().sum()
            emu.current_stream().wait_stream(stream)
            loss.backward()
            return int(not torch.equal(ours.grad.cpu(), expected.grad))
            """,
        )
        assert flags == 0

    def test_a_seed_repeats(self, spawn: Spawn) -> None:
        code = """
            import torch, torch_uvm
            torch_uvm.emulated.configure(seed=3)
            there = torch.ones(1 << 12, device="emu")
            seen = []
            hosts = [torch.zeros(1 << 12).pin_memory() for _ in range(30)]
            for host in hosts:
                host.copy_(there, non_blocking=True)
                seen.append(torch_uvm._C.emu_pending_operations())
            print(seen, [h[0].item() for h in hosts])
            """
        first, second = spawn(code).stdout, spawn(code).stdout
        assert first == second and "1" in first


class TestQueuedCopies:
    @pytest.mark.parametrize(
        "wait",
        [
            lambda: torch.accelerator.synchronize(),
            lambda: emu.synchronize("emu:0"),
            lambda: emu.current_stream().synchronize(),
            lambda: emu.current_stream().record_event().synchronize(),
        ],
    )
    def test_are_done_after_any_wait(self, wait: Callable[[], None]) -> None:
        there, host = torch.ones(4 * MIB, device="emu"), torch.zeros(4 * MIB).pin_memory()
        host.copy_(there, non_blocking=True)
        wait()
        assert bool(host.eq(1).all()) and _C.emu_pending_operations() == 0

    def test_keep_the_memory_that_they_use_alive(self) -> None:
        """Pinned memory that is freed during a queued copy stays allocated until the copy is done."""
        there = torch.zeros(20, MIB, device="emu")
        for row in range(20):
            there[row].copy_(torch.full((MIB,), float(row)).pin_memory(), non_blocking=True)
        assert there.mean(1).tolist() == list(range(20))
