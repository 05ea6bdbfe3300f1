"""Small models and one way to train them, for comparisons between devices to the last bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Convolutional(nn.Module):
    """Convolutions, batch normalisation, pooling, a linear head: images (N, 3, 16, 16) to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, groups=2),
            nn.GroupNorm(4, 16),
            nn.GELU(),
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.features(images).flatten(1))
        return scores


class Recurrent(nn.Module):
    """One kind of recurrent layer over (N, T, 12), its last output to 10 classes."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(12, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.LazyLinear(10)
        self(torch.zeros(1, 2, 12))  # gives the lazy head its size

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layer(sequences)[0][:, -1])
        return scores


class Gpt(nn.Module):
    """Two pre-norm blocks with causal attention over tokens (N, T) < 10, tied weights."""

    def __init__(self, checkpointed: bool = False, width: int = 32) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(10, width)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores.flatten(0, 1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


class Encoder(nn.Module):
    """PyTorch's own transformer encoder, with dropout, over (N, T, 16), to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encoder(x).mean(1))
        return scores


def images() -> torch.Tensor:
    return torch.randn(8, 3, 16, 16)


def sequences() -> torch.Tensor:
    return torch.randn(8, 6, 12)


def tokens() -> torch.Tensor:
    return torch.randint(0, 10, (4, 8))


def vectors() -> torch.Tensor:
    return torch.randn(4, 6, 16)


@dataclass
class Run:
    """The results of a training: the loss of each step, and the parameters on the CPU."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def is_close(self, other: Run, tolerance: float = 1e-4) -> bool:
        """Equal but for roundings."""
        return torch.allclose(
            torch.tensor(self.losses), torch.tensor(other.losses), tolerance, tolerance
        ) and all(
            torch.allclose(value, other.parameters[name], tolerance, tolerance)
            for name, value in self.parameters.items()
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        return (
            self.losses == other.losses
            and self.parameters.keys() == other.parameters.keys()
            and all(torch.equal(value, other.parameters[name]) for name, value in self.parameters.items())
        )


def train(
    model: nn.Module,
    make_input: Callable[[], torch.Tensor],
    device: str,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    steps: int = 4,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    clip: float | None = None,
    accumulate: int = 1,
) -> Run:
    """Trains a copy of `model` on `device`, on inputs and targets drawn on the CPU from one seed."""
    torch.manual_seed(7)
    model = copy.deepcopy(model).to(device)
    optimize = optimizer(model.parameters(), **{"lr": 0.05, **(options or {})})
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=scaled)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimize, 0.9)
    data = [(make_input(), None) for _ in range(steps * accumulate)]
    targets = [torch.randint(0, 10, (2048,)) for _ in data]
    run = Run()
    for step, ((batch, _), target) in enumerate(zip(data, targets, strict=True)):
        torch.manual_seed(step)  # dropout draws the same on every device
        context = torch.autocast(device, dtype=autocast) if autocast is not None else contextlib.nullcontext()
        with context:
            output = model(batch.to(device))
            loss = F.cross_entropy(output.float(), target[: len(output)].to(device))
        scaler.scale(loss / accumulate).backward()
        run.losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            if clip is not None:
                scaler.unscale_(optimize)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimize)
            scaler.update()
            optimize.zero_grad()
            scheduler.step()
    run.parameters = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    return run


def make_workspaces(device: str) -> None:
    """Makes cuBLAS allocate its permanent workspaces, for this thread and for the thread of backward.

    Otherwise the first iteration would have requests that later iterations do not have.
    """
    layer = nn.Linear(8, 8).to(device)
    layer(torch.ones(4, 8).to(device)).sum().backward()
