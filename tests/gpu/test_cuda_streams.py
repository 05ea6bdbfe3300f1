"""Order between streams and the host: waits of moves, and reuse of memory across streams and by the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _cuda import busy, is_managed_by_cuda, is_pending

import torch_uvm

COUNT = 1 << 20
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


class TestMoves:
    def test_to_the_cpu_waits(self) -> None:
        x = torch_uvm.memory.zeros(COUNT)
        torch.cuda.synchronize()
        busy()
        x.fill_(1)
        y = torch_uvm.to(x, "cpu")
        assert not is_pending()
        assert y.data_ptr() == x.data_ptr() and y.sum().item() == COUNT

    def test_to_the_cpu_non_blocking_does_not_wait(self) -> None:
        x = torch_uvm.memory.zeros(COUNT)
        torch_uvm.to(x, "cpu", non_blocking=True)  # so that one-time initialisation is done
        torch.cuda.synchronize()
        busy(200)
        x.fill_(1)
        y = torch_uvm.to(x, "cpu", non_blocking=True)
        assert is_pending(), "it waited"
        torch.cuda.synchronize()
        assert y.sum().item() == COUNT

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_to_the_device_does_not_wait(self, non_blocking: bool) -> None:
        x = torch_uvm.memory.ones(COUNT, device="cpu")
        torch_uvm.to(torch_uvm.memory.ones(COUNT, device="cpu"), "cuda")
        torch.cuda.synchronize()
        busy(200)
        y = torch_uvm.to(x, "cuda", non_blocking=non_blocking)
        assert is_pending(), "it waited"
        assert y.sum().item() == COUNT

    def test_to_the_cpu_waits_for_recorded_streams(self) -> None:
        side = torch.cuda.Stream()
        x = torch_uvm.memory.zeros(COUNT)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            busy()
            x.fill_(1)
        x.record_stream(side)
        assert torch_uvm.to(x, "cpu").sum().item() == COUNT

    def test_bytes_are_seen_from_both_sides(self) -> None:
        x = torch_uvm.memory.zeros(COUNT)
        y = torch_uvm.to(x, "cpu")
        for turn in range(1, 6):
            y += 1  # the host writes
            x += 1  # a kernel writes
            torch.cuda.synchronize()
            assert y[0].item() == y[-1].item() == 2 * turn
        assert is_managed_by_cuda(x)

    def test_plain_copies_wait_as_pytorchs_do(self) -> None:
        x = torch_uvm.memory.zeros(COUNT)
        busy()
        x.fill_(1)
        assert x.cpu().sum().item() == COUNT
        pinned = torch.empty(COUNT).pin_memory()
        x.fill_(2)
        pinned.copy_(x, non_blocking=True)
        torch.cuda.synchronize()
        assert pinned.sum().item() == 2 * COUNT


class TestReuse:
    def test_on_another_stream_only_after_record_stream_is_done(self) -> None:
        side = torch.cuda.Stream()
        x = torch_uvm.memory.ones(COUNT)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            busy()
            seen = x.clone()
        x.record_stream(side)
        del x
        others = [torch_uvm.memory.zeros(COUNT) for _ in range(4)]
        torch.cuda.synchronize()
        assert seen.sum().item() == COUNT
        assert all(t.sum().item() == 0 for t in others)

    def test_on_the_same_stream_at_once(self) -> None:
        x = torch_uvm.memory.ones(COUNT)
        address = x.data_ptr()
        busy()
        del x
        assert torch_uvm.memory.empty(COUNT).data_ptr() == address

    def test_by_the_host_only_after_pending_kernels(self) -> None:
        """A CPU tensor's block is freed while a kernel still reads it. The next CPU tensor must not overwrite
        it."""
        host = torch_uvm.memory.ones(COUNT, device="cpu")
        device = torch_uvm.to(host, "cuda")
        torch.cuda.synchronize()
        busy()
        seen = device.clone()
        del host, device
        for _ in range(4):
            torch_uvm.memory.empty(COUNT, device="cpu").zero_()
        torch.cuda.synchronize()
        assert seen.sum().item() == COUNT

    def test_of_a_device_block_by_the_host_only_after_pending_kernels(self) -> None:
        torch_uvm.memory.empty_cache()
        x = torch_uvm.memory.zeros(COUNT)
        torch.cuda.synchronize()
        busy()
        x.fill_(7)
        del x
        host = [torch_uvm.memory.zeros(COUNT, device="cpu") for _ in range(4)]
        torch.cuda.synchronize()
        assert all(t.sum().item() == 0 for t in host)


class TestThreads:
    def test_threads_allocate_on_streams_of_their_own(self) -> None:
        failures: list[str] = []

        def work(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()), torch_uvm.enabled():
                for turn in range(200):
                    x = torch.full((1 + (turn * 977) % 40000,), float(number), device="cuda")
                    if turn % 20 == 0 and not (x.cpu() == number).all():
                        failures.append(f"thread {number}, turn {turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


class TestOtherMode:
    @pytest.mark.parametrize(
        ("scope", "other"),
        [(torch_uvm.enabled, torch_uvm.disabled), (torch_uvm.disabled, torch_uvm.enabled)],
        ids=["managed", "native"],
    )
    def test_freed_with_the_switch_in_the_other_state(self, scope: Scope, other: Scope) -> None:
        before = torch_uvm.memory.memory_allocated(), torch.cuda.memory_allocated()
        with scope():
            kept = [torch.ones(n, device="cuda") for n in (10, 1000, COUNT)]
        with other():
            del kept
        assert (torch_uvm.memory.memory_allocated(), torch.cuda.memory_allocated()) == before

    def test_operators_mix_both_kinds(self) -> None:
        native = torch.full((1000,), 2.0, device="cuda")
        managed = torch_uvm.memory.full((1000,), 3.0)
        assert (native * managed).sum().item() == 6000
        native.copy_(managed)
        assert native.sum().item() == 3000
        assert torch.cat([native, managed]).sum().item() == 6000
