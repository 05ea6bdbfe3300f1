"""Compiled training on a GPU under a budget. Inductor's kernels are launched without an operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from _spawn import Spawn

COMPILED = """
import sys
import torch, torch_uvm
from torch import nn
from torch._inductor import config
from torch_uvm._patches import graph_pieces

# The same pieces without a budget: kernels that are fused in another way round in another way.
graph_pieces.most_bytes = lambda graph, inputs: 8 << 20
config.compile_threads = 1
config.fallback_random = True
MIB = 1 << 20
torch.use_deterministic_algorithms(True)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x):
        x = self.norm(self.first(x)).relu().mean(1).flatten(1)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x.square().mean()


def train(mode, budget, compile_optimizer):
    torch._dynamo.reset()
    torch_uvm.enable(budget=budget)
    torch_uvm.memory.reset_residency_stats()
    torch.manual_seed(0)
    model = Network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, mode=mode)
    update = torch.compile(optimizer.step) if compile_optimizer else optimizer.step
    losses = []
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(32, 3, 32, 32).cuda()
        loss = compiled(x)
        loss.backward()
        update()
        optimizer.zero_grad()
        losses.append(loss.item())
        pressure = [torch.ones(MIB, device="cuda") for _ in range(6)]
    state = [value.detach().cpu().clone() for value in model.state_dict().values()]
    state += [each["exp_avg"].cpu().clone() for each in optimizer.state.values()]
    figures = torch_uvm.stats()
    del model, compiled, optimizer, update, loss, pressure
    torch._dynamo.reset()
    torch.cuda.synchronize()
    return losses, state, figures


def check(mode, compile_optimizer, budget, most_over=None):
    first = train(mode, None, compile_optimizer)
    second = train(mode, None, compile_optimizer)
    found = train(mode, budget, compile_optimizer)
    figures = found[2]
    assert figures["written_back"]["bytes"] > 0, figures
    assert figures["failures"] == 0, figures
    assert most_over is None or figures["over_budget"] <= most_over, figures
    assert torch_uvm._C.check_residency() is None
    same = first[0] == second[0] and all(map(torch.equal, first[1], second[1]))
    if same:
        assert found[0] == first[0], (found[0], first[0])
        for number, (one, other) in enumerate(zip(found[1], first[1])):
            assert torch.equal(one, other), number
    else:  # the kernels are not deterministic
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(first[0]), rtol=1e-4, atol=1e-5)
"""


class TestCompiled:
    """Inductor's kernels are launched without an operator."""

    @pytest.fixture
    def compiling(self, spawn: Spawn) -> Callable[[str], None]:
        pytest.importorskip("triton")

        def compile_and_run(code: str) -> None:
            spawn(COMPILED + code, timeout=170)

        return compile_and_run

    @pytest.mark.timeout(180)
    def test_training(self, compiling: Callable[[str], None]) -> None:
        """Parameters, gradients and moments are 96 MiB. The whole graph would use about 60 MiB at once."""
        compiling("check('default', False, 56 * MIB, most_over=0)")

    @pytest.mark.timeout(180)
    def test_training_with_a_compiled_optimizer(self, compiling: Callable[[str], None]) -> None:
        """The optimizer is one region that uses everything. A part is used on the host."""
        compiling("check('default', True, 72 * MIB)")

    @pytest.mark.timeout(180)
    def test_training_with_captured_graphs(self, compiling: Callable[[str], None]) -> None:
        compiling("check('reduce-overhead', False, 88 * MIB)")
