"""Residency statistics under a budget, and the marks of steps that they are based on."""

from __future__ import annotations

import threading

import pytest
import torch
from _pressure import (
    MIB,
    press,
    small_hard_budget,  # noqa: F401  (the fixture `budget`)
)
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C

EMU = {"TORCH_UVM_DEVICE": "emu"}


class TestSteps:
    @pytest.fixture
    def marks(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        marks: list[str] = []
        monkeypatch.setattr(_C, "mark_step", lambda: marks.append(threading.current_thread().name))
        return marks

    def test_optimizers_mark_them(self, budget: int, marks: list[str]) -> None:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            optimizer.step()
        torch_uvm.enable(budget="9MiB")  # installs the marks only once
        optimizer.step()
        assert len(marks) == 4

    def test_users_mark_them(self, marks: list[str]) -> None:
        torch_uvm.step()
        assert len(marks) == 1

    def test_compiled_optimizers_run_as_before(self, budget: int, marks: list[str]) -> None:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(1, 3)).sum().backward()
        before = model.bias.detach().clone()
        torch.compile(lambda: optimizer.step(), backend="eager")()
        assert torch.equal(model.bias, before - 0.5)


class TestStatistics:
    def test_keys(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        press()
        x.sum()
        stats = torch_uvm.stats()
        for what in ("fetched", "written_back", "dropped_clean", "used_in_place", "waited"):
            assert stats[what].keys() == {"count", "bytes", "ms"}, what
        device = torch.device("emu", 0)
        assert stats["fetched"]["bytes"] > 0 and stats["written_back"]["bytes"] > 0
        assert 0 < stats["device_bytes"][device] <= stats["peak_device_bytes"][device] <= budget
        assert stats["host_bytes"] > 0 and stats["over_budget"] == 0
        assert stats["plan_hits"] + stats["plan_misses"] > 0

    def test_reset(self, budget: int) -> None:
        press()
        torch_uvm.memory.reset_residency_stats()
        stats = torch_uvm.stats()
        assert stats["written_back"] == {"count": 0, "bytes": 0, "ms": 0.0}
        assert stats["plan_hits"] == stats["plan_misses"] == 0

    def test_peaks_are_reset_with_those_of_all_memory(self, budget: int) -> None:
        device = torch.device("emu", 0)
        press()
        torch_uvm.memory.empty_cache()
        before = torch_uvm.stats()
        assert before["peak_device_bytes"][device] > before["device_bytes"][device]
        torch_uvm.memory.reset_residency_stats()
        assert torch_uvm.stats()["peak_device_bytes"] == before["peak_device_bytes"]
        torch_uvm.memory.reset_peak_memory_stats()
        assert torch_uvm.stats()["peak_device_bytes"] == before["device_bytes"]

    def test_without_a_budget_ever(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch_uvm
            stats = torch_uvm.stats()
            torch_uvm.memory.ones(4, device="emu:0")
            torch_uvm.memory.reset_residency_stats()
            assert stats["fetched"] == {"count": 0, "bytes": 0, "ms": 0.0} and stats["host_bytes"] == 0
            assert not any(stats["device_bytes"].values())
            """,
            env=EMU,
        )
