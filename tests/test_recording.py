"""Recordings of accesses: their content, their files, and their end with the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _pressure import (
    MIB,
    press,
    small_hard_budget,  # noqa: F401  (the fixture `budget`)
)
from _spawn import Spawn

import torch_uvm

EMU = {"TORCH_UVM_DEVICE": "emu"}


class TestRecording:
    def test_is_read_back(self, budget: int, tmp_path: Path) -> None:
        from torch_uvm import traces

        path = tmp_path / "accesses.jsonl"
        x = torch.full((MIB // 2,), 3.0, device="emu")
        with torch_uvm.tools.record_accesses(path) as recording:
            assert str(path) in repr(recording)
            press()
            x.sum()
            torch_uvm.step()
        recording.stop()  # has no effect
        size = path.stat().st_size
        press()
        assert path.stat().st_size == size > 0
        trace = traces.read_trace(path)
        assert trace.operators
        assert sum(group.operators for group in trace.groups) == len(trace.operators)
        assert all(group.us >= 0 for group in trace.groups)

    def test_the_device_waits_from_the_third_iteration_on(self, budget: int, tmp_path: Path) -> None:
        from torch_uvm import traces

        x = torch.ones(MIB // 4, device="emu")

        def loop() -> None:
            x.mul_(2)
            x.add_(1)
            (x + 1).sum()
            torch_uvm.step()

        for _ in range(4):
            loop()
        with torch_uvm.tools.record_accesses(tmp_path / "trace"):
            for _ in range(6):
                loop()
        trace = traces.read_trace(tmp_path / "trace")
        assert len(trace.operators) % 6 == 0
        assert trace.holds and min(trace.holds) >= len(trace.operators) // 3
        assert not trace.transfers

    def test_nothing_waits_longer_beside_transfers(self, budget: int, tmp_path: Path) -> None:
        from torch_uvm import traces

        others = [torch.ones(MIB // 2, device="emu") for _ in range(12)]
        with torch_uvm.tools.record_accesses(tmp_path / "trace"):
            for _ in range(12):
                for other in others:
                    other.add_(1)
                torch_uvm.step()
        trace = traces.read_trace(tmp_path / "trace")
        assert trace.transfers and not trace.holds

    def test_temporary_storages_are_workspace(self, budget: int, tmp_path: Path) -> None:
        """Those that operators inside the operator make and free."""
        with torch.library._scoped_library("uvm_test_recording", "DEF") as library:
            library.define("doubled_sum(Tensor x) -> Tensor")
            library.impl("doubled_sum", lambda x: x.mul(2).sum(), "CompositeExplicitAutograd")
            x = torch.full((MIB,), 3.0, device="emu")
            with torch_uvm.tools.record_accesses(tmp_path / "trace"):
                assert torch.ops.uvm_test_recording.doubled_sum(x).item() == 6 * MIB
        lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
        (begin,) = (at for at, line in enumerate(lines) if "doubled_sum" in line.get("operator", ""))
        workspaces = [line["workspace"] for line in lines[begin:] if "workspace" in line]
        assert workspaces and 4 * MIB <= workspaces[0] < 5 * MIB

    def test_temporary_storages_on_the_host_are_workspace(self, spawn: Spawn, tmp_path: Path) -> None:
        """Else no room is made for them, and they are created on the host in every step."""
        spawn(
            """
            import sys, torch, torch_uvm
            MIB = 1024**2
            torch_uvm.emulated.configure(memory=64 * MIB)
            torch_uvm.enable()
            library = torch.library.Library("uvm_test_recording", "DEF")
            library.define("doubled_sum(Tensor x) -> Tensor")
            library.impl("doubled_sum", lambda x: x.mul(2).sum(), "CompositeExplicitAutograd")
            with torch_uvm.resident(torch.ones(8 * MIB, device="emu")):
                x = torch.full((4 * MIB,), 3.0, device="emu")
                with torch_uvm.tools.record_accesses(sys.argv[1]):
                    assert torch.ops.uvm_test_recording.doubled_sum(x).item() == 24 * MIB
                assert torch_uvm.stats()["over_budget"] == 1
            """,
            args=[str(tmp_path / "trace")],
            env=EMU,
        )
        lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
        (workspace,) = (line["workspace"] for line in lines if "workspace" in line)
        assert 16 * MIB <= workspace < 17 * MIB

    def test_one_at_a_time(self, budget: int, tmp_path: Path) -> None:
        with torch_uvm.tools.record_accesses(str(tmp_path / "a")):
            with pytest.raises(RuntimeError, match="is active"):
                torch_uvm.tools.record_accesses(tmp_path / "b")
        assert not (tmp_path / "b").exists()
        torch_uvm.tools.record_accesses(tmp_path / "b").stop()

    def test_bad_paths(self, tmp_path: Path) -> None:
        record: Any = torch_uvm.tools.record_accesses
        with pytest.raises(TypeError, match=r"path is 3 \(int\)"):
            record(3)
        with pytest.raises(IsADirectoryError, match="is a folder"):
            record(tmp_path)
        with pytest.raises(FileNotFoundError, match="no folder"):
            record(tmp_path / "none" / "a")
        assert list(tmp_path.iterdir()) == []

    def test_is_complete_when_the_process_exits(self, spawn: Spawn, tmp_path: Path) -> None:
        spawn(
            """
            import os, torch, torch_uvm
            torch_uvm.enable(budget="8MiB")
            torch_uvm.tools.record_accesses("at_exit.jsonl")
            os.chdir("/")
            x = [torch.ones(1 << 18, device="emu") + 1 for _ in range(4)]
            """,
            env=EMU,
        )
        from torch_uvm import traces

        assert traces.read_trace(tmp_path / "at_exit.jsonl").operators
