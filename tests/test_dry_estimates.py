"""`estimate_memory`: beside a plan of the same loop, and where it fails. Each forks, so it has a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _spawn import Spawn
from test_plan_dry import HEAD, LOOP, plan

ENV = {"TORCH_UVM_DEVICE": "emu"}
START = """
    import json
    import torch
    from torch import nn
    import torch_uvm

    def make():
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, fused=True)
"""
ESTIMATE = (
    START
    + """
    class Result:
        def __init__(self, x):
            self.loss = x.square().mean()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make()

        def forward(self, x):
            return Result(self.layers(x))

    found = torch_uvm.estimate_memory(
        Model,
        lambda: {"x": torch.randn(1024, 2048, device="cuda")},
        optimizer,
        card="t4",
        budgets=["300MiB", "1MiB"],
    )
    assert not torch_uvm.is_enabled() and torch.ones(4, device="emu").sum() == 4  # here nothing is dry
    steps = {str(budget): ms for budget, ms in found.budgets.items()}
    print(json.dumps([found.peak_bytes, found.step_ms, found.by_category, steps, found.fits, found.by_line]))
    print(found)
"""
)
FAILING = (
    START
    + """
    def attempt(*functions):
        try:
            torch_uvm.estimate_memory(*functions)
        except Exception as error:
            print(type(error).__name__, error)

    attempt(make, lambda: torch.randn(3), optimizer)
    attempt(lambda: nn.Identity(), lambda: 3, lambda it: None)
    torch.ones(4, device="emu")
    attempt(make, lambda: torch.randn(3), optimizer)
"""
)


def test_an_estimate_is_a_plan(spawn: Spawn, tmp_path: Path) -> None:
    done = spawn(ESTIMATE, env=ENV)
    first, *shown = done.stdout.splitlines()
    peak, step_ms, by_category, steps, fits, by_line = json.loads(first)
    planned = plan(tmp_path, HEAD + LOOP, "--card", "t4", "--budgets", "300MiB", "--json", "plan.json")
    assert planned.returncode == 0, planned.stderr
    (wanted,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert peak == pytest.approx(wanted["peak_bytes"], rel=0.02)
    assert step_ms == pytest.approx(wanted["in_core_ms"], rel=0.05)
    assert by_category["optimizer state"] == 128 << 20
    assert steps[str(300 << 20)] == pytest.approx(wanted["points"][0]["step_ms"], rel=0.05)
    assert steps[str(1 << 20)] is None
    assert fits
    assert any("in forward" in it for it in by_line)
    assert shown[0].startswith("peak ") and "on t4: it fits" in shown[0]


def test_what_cannot_be_estimated_says_why(spawn: Spawn) -> None:
    said = spawn(FAILING, env=ENV).stdout.splitlines()
    assert "[1, 3] X [2048, 2048]" in said[0]
    assert "the model returned int; accepted: tensors" in said[1]
    assert "in use already" in said[2]
