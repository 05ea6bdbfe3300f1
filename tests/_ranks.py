"""One of two ranks, its budget, and a network that every rank trains identically."""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torch_uvm

MIB = 1024**2
RANKS = 2
PATIENCE = datetime.timedelta(seconds=90)
LIMIT = 256 * MIB  # of each rank
WIDTH, LAYERS = 768, 6  # a layer has 2.25 MiB


@dataclass(frozen=True)
class Rank:
    rank: int
    device: torch.device
    plain: torch.device  # the reference: the CPU, or the same GPU without torch_uvm
    folder: Path

    @contextlib.contextmanager
    def budget(
        self, budget: int, optimizer: str = "in_place", *, moves: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Enables managed memory with `budget`, which is below the peak. Yields a dict that receives the
        figures."""
        figures: dict[str, Any] = {}
        gc.collect()
        torch_uvm.memory.empty_cache()
        torch_uvm.memory.reset_peak_memory_stats()
        torch_uvm.enable(budget=budget, optimizer=optimizer)
        torch_uvm.memory.reset_residency_stats()
        try:
            yield figures
            torch.accelerator.synchronize()
            figures |= torch_uvm.stats()
        finally:
            torch_uvm.disable()
            gc.collect()
            torch_uvm.set_budget(None)
            torch_uvm.enable(budget=None, optimizer="in_place")
            torch_uvm.disable()
        for what in ("fetched", "written_back") if moves else ():
            assert figures[what]["bytes"] > 0, what
        assert figures["failures"] == 0
        if figures["over_budget"] == 0:
            assert figures["peak_device_bytes"][self.device] <= budget


Losses = list[float]
Contents = dict[str, torch.Tensor]
Train = Callable[[int, torch.device], tuple[Losses, Contents]]


def network() -> nn.Sequential:
    """The same network on every rank and device: it is made on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 9))


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    device: torch.device,
    numbers: range,
    *,
    clip: bool = False,
) -> Losses:
    losses = []
    for number in numbers:
        torch.manual_seed(2 * number + rank)
        x, y = torch.randn(16, WIDTH).to(device), torch.randint(0, 9, (16,)).to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU. A DTensor is gathered from all ranks."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contents:
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    found |= {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": whole(value) for name, value in state.items() if torch.is_tensor(value)}
    return found


def assert_equal(found: tuple[Losses, Contents], wanted: tuple[Losses, Contents]) -> None:
    assert found[0] == wanted[0], (found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys() and len(wanted[1]) >= 2 * LAYERS
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


@cache
def plain(train: Train, rank: Rank) -> tuple[Losses, Contents]:
    """The reference without torch_uvm. On a GPU two such runs must be equal to be comparable."""
    first = train(rank.rank, rank.plain)
    if rank.plain.type != "cpu":
        assert_equal(train(rank.rank, rank.plain), first)
    return first
