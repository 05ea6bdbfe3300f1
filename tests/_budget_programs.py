"""Models of about 20 MiB, and a check of a program under a budget against its run without one.

The small models of _models.py would fit into any budget.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _models import Gpt
from torch import nn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
DEVICE = torch.device("emu", 0)
Program = Callable[[], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def no_budget_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    _C.request_budget(None, None)
    torch_uvm.memory.empty_cache()


def run(program: Program, budget: int | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Returns the program's results and the figures of its run. No tensor stays on the device."""
    gc.collect()
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.enable(budget=budget)
    torch_uvm.memory.reset_residency_stats()
    torch_uvm.emulated.reset_counters()
    torch.manual_seed(0)
    results = [result.detach().cpu() for result in program()]
    figures = torch_uvm.stats()
    figures["used"] = torch_uvm.memory.max_memory_allocated(DEVICE)
    figures["resident"] = torch_uvm.emulated.max_resident_bytes(DEVICE)
    torch_uvm.set_budget(None)
    return results, figures


def check(program: Program, share: float = 0.6, least: int = 8 * MIB) -> dict[str, Any]:
    """Runs the program with a budget of `share` of its peak, at least `least` bytes. Returns the figures."""
    expected, plain = run(program, None)
    budget = max(int(plain["used"] * share), least)
    assert budget < plain["used"], "the program fits: nothing would be tested"
    results, figures = run(program, budget)
    assert len(results) == len(expected) > 0
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(result, wanted), number
    if figures["over_budget"] == 0:
        assert figures["peak_device_bytes"][DEVICE] <= budget
        assert figures["resident"] <= budget
    assert (
        figures["device_bytes"][DEVICE] <= budget
    )  # within the budget again, even after an operator that exceeded it
    assert figures["written_back"]["bytes"] > 0
    return figures


def mlp(width: int = 768, layers: int = 6) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def cnn() -> nn.Module:
    def block(wide: int, wider: int) -> list[nn.Module]:
        return [nn.Conv2d(wide, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *block(3, 64), nn.MaxPool2d(2), *block(64, 256), nn.MaxPool2d(2), *block(256, 256), *block(256, 256),
        *block(256, 256), *block(256, 256), *block(256, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip


def gpt(checkpointed: bool = False) -> nn.Module:
    return Gpt(checkpointed, width=384)


def vectors(batch: int = 64) -> torch.Tensor:
    return torch.randn(batch, 768)


def images(batch: int = 16) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16)


def tokens(batch: int = 16) -> torch.Tensor:
    return torch.randint(0, 10, (batch, 16))


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().cpu() for value in model.state_dict().values()]


def training(
    make_model: Callable[[], nn.Module],
    make_input: Callable[..., torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    steps: int = 5,
    accumulate: int = 1,
    sizes: list[int] | None = None,
    evaluate: bool = False,
    **options: Any,
) -> Program:
    """An ordinary training loop; returns its losses and its last parameters."""

    def program() -> list[torch.Tensor]:
        model = make_model().to("emu")
        optimize = optimizer(model.parameters(), lr=0.01, **options)
        results = []
        for step in range(steps):
            for _ in range(accumulate):
                batch = make_input(sizes[step % len(sizes)]) if sizes else make_input()
                output = model(batch.to("emu"))
                target = torch.randint(0, 10, (len(output),)).to("emu")
                loss = F.cross_entropy(output, target) / accumulate
                loss.backward()
                results.append(loss.detach().cpu())
            optimize.step()
            optimize.zero_grad()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    results.append(model(make_input().to("emu")).cpu())
                model.train()
        return results + parameters(model)

    return program


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "adamw loop": {"optimizer": torch.optim.AdamW, "foreach": False},
    "adamw foreach": {"optimizer": torch.optim.AdamW, "foreach": True},
    "adamw fused": {"optimizer": torch.optim.AdamW, "fused": True},
}
