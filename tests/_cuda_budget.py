"""Training programs on a GPU under a budget, compared with runs without one.

Programs use some tens of MiB, and budgets are shares of that.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any, NamedTuple

# Read when cuBLAS is initialised. Without it, matrix products may differ between two runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from _cuda import MIB
from torch import nn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C

Program = Callable[[], list[torch.Tensor]]


class Run(NamedTuple):
    results: list[torch.Tensor]
    figures: dict[str, Any]
    used: int  # peak of managed bytes
    reserved: int


def run(program: Program, budget: int | str | None) -> Run:
    gc.collect()
    torch.cuda.synchronize()
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.enable(budget=budget)
    torch_uvm.memory.reset_residency_stats()
    torch.manual_seed(0)
    try:
        results = [result.detach().cpu() for result in program()]
        figures = torch_uvm.stats()
        assert _C.check_residency() is None
        return Run(
            results,
            figures,
            torch_uvm.memory.max_memory_allocated(0),
            torch_uvm.memory.max_memory_reserved(0),
        )
    finally:
        torch_uvm.disable()


def check(program: Program, share: float = 0.6) -> Run:
    """Runs the program with a budget of `share` of its peak."""
    plain = run(program, None)
    budget = int(plain.used * share)
    assert budget >= 8 * MIB, "too small: it would not be moved"
    bounded = run(program, budget)
    assert len(bounded.results) == len(plain.results) > 0
    for number, (result, wanted) in enumerate(zip(bounded.results, plain.results, strict=True)):
        assert torch.equal(result, wanted), number
    assert bounded.figures["written_back"]["bytes"] > 0, bounded.figures
    assert bounded.figures["failures"] == 0, bounded.figures
    if bounded.figures["over_budget"] == 0:
        assert bounded.reserved <= budget
    return bounded


def mlp(width: int = 1024, layers: int = 6) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*parts, nn.Linear(width, 16))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(512, 1024), torch.randint(0, 16, (512,))


class Transformer(nn.Module):
    def __init__(self, checkpointed: bool = False, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1024)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, 1024, (16, 65))
    return words[:, :-1], words[:, 1:]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def training(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    steps: int = 5,
    **options: Any,
) -> Program:
    def program() -> list[torch.Tensor]:
        model = make_model().to("cuda", dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        losses = []
        for _ in range(steps):
            inputs, target = make_batch()
            inputs = inputs.to("cuda", dtype if inputs.is_floating_point() else None)
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2).float(), target.to("cuda").flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.state_dict().values()]

    return program


def churn(kept: list[torch.Tensor]) -> None:
    """Allocates and uses more than any budget of the importing file, so that every movable storage is
    evicted."""
    for each in kept:
        each.add_(1)
