"""Random models, optimizers and inputs for `soak_training.py`, on the CPU and on the accelerator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CLASSES = 10
Stages = list[nn.Module]


class Residual(nn.Module):
    """Adds the output of its parts to the input."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inner(x)
        return result


class Attention(nn.Module):
    """Causal attention over (N, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


class Pooled(nn.Module):
    """The mean over all dimensions but the batch's and the channels'."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1) if self.channels_last else x.mean((2, 3))


def vectors(rng: random.Random) -> tuple[Stages, Callable[[int], torch.Tensor]]:
    first = width = rng.choice([64, 256, 384])
    stages: Stages = []
    for _ in range(rng.randint(2, 8)):
        if rng.random() < 0.4:
            inner = rng.choice([256, 512, 768])
            stages.append(
                Residual(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            )
        else:
            wide = rng.choice([200, 256, 512, 640, 768])
            bias = rng.random() < 0.7
            stages.append(
                nn.Sequential(nn.Linear(width, wide, bias=bias), rng.choice([nn.ReLU, nn.GELU, nn.Tanh])())
            )
            width = wide
    stages.append(nn.Linear(width, CLASSES))
    return stages, lambda batch: torch.randn(batch, first)


def tokens(rng: random.Random) -> tuple[Stages, Callable[[int], torch.Tensor]]:
    words, width, length = rng.choice([300, 1000, 4000]), rng.choice([128, 192, 256]), rng.choice([8, 16])
    heads = rng.choice([2, 4])
    stages: Stages = [nn.Embedding(words, width)]
    for _ in range(rng.randint(1, 3)):
        stages.append(Residual(nn.LayerNorm(width), Attention(width, heads)))
        hidden = width * rng.choice([2, 4])
        stages.append(
            Residual(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        )
    stages.append(nn.Sequential(nn.LayerNorm(width), Pooled(True), nn.Linear(width, CLASSES)))
    return stages, lambda batch: torch.randint(0, words, (batch, length))


def images(rng: random.Random) -> tuple[Stages, Callable[[int], torch.Tensor]]:
    wide = 3
    stages: Stages = []
    for depth in range(rng.randint(2, 5)):
        wider = rng.choice([48, 96, 160])
        parts: list[nn.Module] = [nn.Conv2d(wide, wider, 3, padding=1)]
        if rng.random() < 0.6:
            parts.append(nn.BatchNorm2d(wider))
        parts.append(nn.ReLU(inplace=rng.random() < 0.5))
        if depth == 0:
            parts.append(nn.MaxPool2d(2))
        stages.append(nn.Sequential(*parts))
        wide = wider
    stages.append(nn.Sequential(Pooled(False), nn.Linear(wide, CLASSES)))
    return stages, lambda batch: torch.randn(batch, 3, 16, 16)


FAMILIES = [vectors, vectors, tokens, images]


class Program(nn.Module):
    """Consecutive stages, each on a device of its own choice. Some are checkpointed. Some are skipped at
    random, where their shapes allow it."""

    def __init__(self, rng: random.Random, devices: int) -> None:
        super().__init__()
        self.family = rng.choice(FAMILIES)
        stages, self.make_input = self.family(rng)
        if devices == 1:
            places = [0] * len(stages)
        elif rng.random() < 0.5:  # two halves
            cut = rng.randint(1, len(stages) - 1)
            places = [int(number >= cut) for number in range(len(stages))]
        else:
            places = [rng.randrange(devices) for _ in stages]
        self.places = places
        self.checkpointed = [rng.random() < 0.2 for _ in stages]
        # Not with batch norm: recomputation would update its statistics twice.
        self.checkpointed = [
            wanted and not any(isinstance(part, nn.BatchNorm2d) for part in stage.modules())
            for wanted, stage in zip(self.checkpointed, stages, strict=True)
        ]
        self.optional = [isinstance(stage, Residual) and rng.random() < 0.5 for stage in stages]
        self.dropout = 0.1 if devices == 1 and rng.random() < 0.2 else 0.0
        self.stages = nn.ModuleList(stages)

    def place(self, devices: list[torch.device]) -> Program:
        """Moves its stages to their devices; places wrap around the list of devices."""
        self.devices = [devices[place % len(devices)] for place in self.places]
        for stage, device in zip(self.stages, self.devices, strict=True):
            stage.to(device)
        return self

    def forward(self, x: torch.Tensor, leave_out: int) -> torch.Tensor:
        """leave_out: the optional stages whose bit is set do not run."""
        for number, (stage, device) in enumerate(zip(self.stages, self.devices, strict=True)):
            if self.optional[number] and leave_out >> number & 1:
                continue
            x = x.to(device)
            if self.checkpointed[number] and x.requires_grad:
                x = checkpoint(stage, x, use_reentrant=False)
            else:
                x = stage(x)
            if self.dropout and x.is_floating_point() and number + 1 < len(self.stages):
                x = F.dropout(x, self.dropout)
        return x

    def describe(self) -> str:
        sizes = [sum(p.numel() for p in stage.parameters()) for stage in self.stages]
        return f"{self.family.__name__}, stages of {sizes} parameters on {self.places}"


def optimizer_of(rng: random.Random) -> tuple[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]]:
    """A random optimizer: its description and its factory."""
    kinds: list[tuple[Any, dict[str, Any], list[str]]] = [
        (torch.optim.SGD, {"lr": 0.01}, ["foreach", "fused"]),
        # Not fused: torch's fused SGD rejects a parameter whose first gradient comes after the others'.
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, ["foreach"]),
        (torch.optim.Adam, {"lr": 1e-3}, ["foreach", "fused"]),
        (torch.optim.AdamW, {"lr": 1e-3}, ["foreach", "fused"]),
        (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}, ["foreach"]),
        (torch.optim.RMSprop, {"lr": 1e-3}, ["foreach"]),
        (torch.optim.Adagrad, {"lr": 1e-2}, ["foreach"]),
    ]
    kind, options, ways = rng.choice(kinds)
    way = rng.choice([*ways, "foreach", "loop"])
    how = {"foreach": False} if way == "loop" else {way: True}
    return f"{kind.__name__}({options}, {way})", lambda parameters: kind(parameters, **options, **how)
