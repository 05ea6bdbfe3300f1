"""When the host may touch managed memory: after a fork, after a discard, and not during device work."""

from __future__ import annotations

import pytest
import torch
from _cuda import CPU_ID, LAST_PREFETCH, MIB, busy, range_attribute
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C


class TestFork:
    def test_a_child_reads_pending_writes(self, spawn: Spawn) -> None:
        spawn(
            """
            import os, torch, torch_uvm

            COUNT = 1 << 20
            torch.set_num_threads(1)
            side = torch.cuda.Stream()
            x, y = torch_uvm.memory.ones(COUNT), torch_uvm.memory.ones(COUNT)
            torch.cuda.synchronize()
            torch.cuda._sleep(600_000_000)
            x.fill_(5)
            with torch.cuda.stream(side):
                torch.cuda._sleep(600_000_000)
                y.fill_(7)
            y.record_stream(side)
            hosts = [torch_uvm.to(t, "cpu", non_blocking=True) for t in (x, y)]
            assert not torch.cuda.current_stream().query() and not side.query(), "it is still being written"
            child = os.fork()
            if child == 0:
                os._exit(0 if [int(host.sum()) for host in hosts] == [5 * COUNT, 7 * COUNT] else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            torch.cuda.synchronize()
            assert [int(host.sum()) for host in hosts] == [5 * COUNT, 7 * COUNT]
            """
        )


class TestDiscard:
    """A discard by CUDA behind pending work takes effect milliseconds after a wait for its stream has
    returned."""

    @pytest.mark.parametrize("stream", ["default", "side"])
    @pytest.mark.parametrize("label", ["cuda", "cpu"])
    def test_later_writes_of_the_host_are_kept(self, label: str, stream: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if stream == "side" else torch.cuda.default_stream()):
            x = torch_uvm.memory.empty(32 * MIB, dtype=torch.uint8)
            for _ in range(6):
                busy(4)
                x.fill_(1)
                if label == "cuda":
                    torch_uvm.discard(x)
                    host = torch_uvm.to(x, "cpu")
                else:
                    host = torch_uvm.to(x, "cpu", non_blocking=True)
                    torch_uvm.discard(host)
                host.fill_(3)
                assert int((x != 3).sum()) == 0
                host.fill_(4)
                torch_uvm.discard(x)
                x.fill_(5)
                assert int((x != 5).sum()) == 0
                assert int((torch_uvm.to(x, "cpu") != 5).sum()) == 0

    def test_moves_the_pages_to_the_next_writer(self) -> None:
        x = torch_uvm.memory.ones(32 * MIB, dtype=torch.uint8)
        torch_uvm.discard(torch_uvm.to(x, "cpu"))
        assert range_attribute(x, LAST_PREFETCH) == [CPU_ID]
        torch_uvm.discard(x)
        torch.cuda.synchronize()
        assert range_attribute(x, LAST_PREFETCH) == [0]


class TestWithoutConcurrentAccess:
    """A device without concurrent managed access, simulated on one that has it: the waits are tested."""

    @pytest.mark.parametrize("pretend", [True, False])
    def test_a_move_to_the_cpu_waits_for_the_whole_device(self, pretend: bool) -> None:
        x, unrelated, side = torch_uvm.memory.ones(1024), torch_uvm.memory.ones(1024), torch.cuda.Stream()
        unrelated += 1  # loading a kernel synchronises the device
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            busy(300)
            unrelated += 1
        unrelated.record_stream(side)
        _C.pretend_not_concurrent(pretend)
        try:
            host = torch_uvm.to(x, "cpu")
            assert side.query() is pretend
            assert float(host.sum()) == 1024
        finally:
            _C.pretend_not_concurrent(False)
            torch.cuda.synchronize()
