"""When the host may touch managed memory: after a fork, and where it may not while a device works."""

from __future__ import annotations

import pytest
import torch
from _cuda import busy
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C


class TestFork:
    def test_a_child_reads_what_was_still_being_written(self, spawn: Spawn) -> None:
        spawn(
            """
            import os, torch, torch_uvm

            COUNT = 1 << 20
            torch.set_num_threads(1)
            side = torch.cuda.Stream()
            x, y = torch_uvm.ones(COUNT), torch_uvm.ones(COUNT)
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


class TestWithoutConcurrentAccess:
    """As on a GPU that has none, as far as one that has it can show: what is waited for."""

    @pytest.mark.parametrize("pretend", [True, False])
    def test_a_move_to_the_cpu_waits_for_the_whole_device(self, pretend: bool) -> None:
        x, unrelated, side = torch_uvm.ones(1024), torch_uvm.ones(1024), torch.cuda.Stream()
        unrelated += 1  # loading a kernel waits for the device
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
