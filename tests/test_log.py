"""Messages: the log "torch_uvm", and the progress output of the command line."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C
from torch_uvm._util import log
from torch_uvm.cli import progress
from torch_uvm.traces import read_trace

EMU = {"TORCH_UVM_DEVICE": "emu"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines logged at INFO and above. No message has been logged before."""
    monkeypatch.setattr(log, "_messages", log.StepMessages())
    _C.reset_residency_stats()
    caplog.set_level(logging.INFO, "torch_uvm")
    said: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.getMessage()}")

    handler = Lines()
    logging.getLogger("torch_uvm").addHandler(handler)
    yield said
    logging.getLogger("torch_uvm").removeHandler(handler)


class TestSettings:
    def test_are_logged_when_they_change(self, lines: list[str]) -> None:
        torch_uvm.enable(limit="1GiB", host_limit="none", budget="64MiB", optimizer="in_place")
        assert lines == [
            "INFO on: budget 64MiB, limit 1073741824, host limit None, moves copy, host tensors False, "
            "optimizer in_place"
        ]
        torch_uvm.set_budget("32MiB")
        torch_uvm.set_budget(None, device=0)
        torch_uvm.set_limit(None)
        torch_uvm.disable()
        assert [it.removeprefix("INFO ") for it in lines[1:]] == [
            "budget of every device: 32MiB",
            "budget of device 0: none",
            "limit of managed memory: none",
            "off: new tensors are not managed",
        ]

    def test_refused_calls_log_nothing(self, lines: list[str]) -> None:
        with pytest.raises(ValueError):
            torch_uvm.set_budget("lots")
        with pytest.raises(ValueError):
            torch_uvm.set_limit(-1)
        assert lines == []


class TestTheEngine:
    def test_is_logged_at_the_end_of_a_step(self, lines: list[str]) -> None:
        device = torch.accelerator.current_accelerator()
        torch_uvm.enable(budget="24MiB")
        kept = [torch.ones(1 << 20, device=device) for _ in range(8)]
        del lines[:]
        for _ in range(3):
            for index in range(8):
                kept[index] = kept[index] * 1.5
            torch_uvm.step()
        # Other lines: failures that an earlier test caused in this process.
        watched = [it for it in lines if "are observed" in it]
        reached = [it for it in lines if "budget is reached" in it]
        assert len(watched) == len(reached) == 1
        assert all(it.startswith("INFO ") for it in watched + reached)

    def test_logs_each_message_once(self) -> None:
        seen = log.StepMessages()
        nothing: dict[str, Any] = {"plan_hits": 0, "plan_misses": 0, "over_budget": 0, "failures": 0}
        nothing |= {"written_back": {"count": 0}, "used_in_place": {"count": 0}}
        assert seen.new(nothing) == []
        stats = nothing | {"plan_misses": 5, "written_back": {"count": 1}, "over_budget": 1, "failures": 2}
        said = seen.new(stats)
        assert [level for level, _ in said] == [logging.INFO, logging.INFO, logging.WARNING, logging.WARNING]
        for level, message in said:
            if level == logging.WARNING:
                assert "logged once" in message and ("raise" in message or "lower" in message)
        assert seen.new(stats | {"plan_misses": 10, "over_budget": 9}) == []
        assert [it for _, it in seen.new(stats | {"plan_hits": 1, "plan_misses": 9})] == [
            "operators are no longer observed: steps repeat and fit the budget"
        ]
        assert [it for _, it in seen.new(stats | {"plan_hits": 2, "plan_misses": 9})] == [
            "operators are observed: memory is short, or was until now"
        ]

    def test_statistics_are_not_read_while_the_log_is_disabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise AssertionError("it was asked")

        monkeypatch.setattr(_C, "residency_stats", fail)
        monkeypatch.setattr(logging.getLogger("torch_uvm"), "disabled", True)
        torch_uvm.step()

    @pytest.mark.parametrize(("options", "said"), [("foreach=True", True), ("fused=True", False)])
    def test_the_remedy_for_an_optimizer_that_exceeds_the_budget_is_logged(
        self, spawn: Spawn, options: str, said: bool
    ) -> None:
        script = f"""
import torch, torch_uvm
torch_uvm.emulated.configure(memory="256MiB")
torch_uvm.enable(budget="6MiB")
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to("emu")
optimizer = torch.optim.AdamW(model.parameters(), {options})
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 512, device="emu")).sum().backward()
    optimizer.step()
"""
        assert spawn(script, env=EMU).stderr.count("needs less with fused=True") == said


def test_a_budget_that_is_kept_prints_nothing(spawn: Spawn) -> None:
    done = spawn(
        """
        import torch, torch_uvm
        torch_uvm.enable(budget="14MiB", limit="1GiB")
        layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to("emu")
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            layers(torch.ones(8, 1024, device="emu")).sum().backward()
            optimizer.step()
        assert torch_uvm.stats()["written_back"]["count"] > 0
        torch_uvm.disable()
        """,
        env=EMU,
    )
    assert (done.stdout, done.stderr) == ("", "")


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class TestProgress:
    @pytest.mark.parametrize("terminal", [True, False])
    def test_long_work_prints_progress(self, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
        screen = Screen(terminal)
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(progress, "_PATIENCE", 0.0)
        with progress.Progress("drawing") as drawing:
            drawing(1, 4)
        said = screen.getvalue()
        assert said.strip("\r").startswith("drawing: 25 %")
        assert said.endswith("\r" if terminal else "\n")

    def test_short_work_prints_no_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = Screen(True)
        monkeypatch.setattr(sys, "stderr", screen)
        with progress.Progress("drawing") as drawing:
            drawing(1, 4)
        assert screen.getvalue() == ""

    def test_reading_a_trace_prints_progress(self, tmp_path: Path) -> None:
        trace = tmp_path / "a.trace"
        header = '{"format": "torch_uvm accesses", "version": 1, "units": {"time": "us", "size": "bytes"}, '
        trace.write_text(header + '"budgets": [null]}\n' + '{"step": "end"}\n' * 20000)
        told: list[tuple[int, int]] = []
        read_trace(trace, lambda done, of: told.append((done, of)))
        assert len(told) == 4 and [it for it, _ in told] == sorted(it for it, _ in told)
        assert {of for _, of in told} == {trace.stat().st_size} and 0 < told[0][0] < told[-1][0] < told[0][1]
