"""The networks whose steps are timed on CUDA. All fit into the benchmark's limit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from _cuda_timing import Call
from torch import nn
from torch.nn import functional as F


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 128, 256, 512):
            layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


class Decoder(nn.Module):
    """A GPT of about 100 M parameters: 12 blocks of width 768."""

    def __init__(self, width: int = 768, depth: int = 12, vocabulary: int = 16384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 12, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.embedding(tokens), mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(hidden)
        return scores


# Name: (factory, number of timed steps).
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "small MLP": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 100)), 60),
    "CNN": (Cnn, 15),
    "GPT, 100 M parameters": (Decoder, 9),
}
BATCHES: dict[str, Callable[[], torch.Tensor]] = {
    "small MLP": lambda: torch.randn(64, 64, device="cuda"),
    "CNN": lambda: torch.randn(64, 3, 128, 128, device="cuda"),
    "GPT, 100 M parameters": lambda: torch.randint(0, 16384, (4, 512), device="cuda"),
}


def make_step(
    make: Callable[[], nn.Module], batch: Callable[[], torch.Tensor], scope: AbstractContextManager[Any]
) -> Call:
    """Makes a network, its optimizer and its batch. Returns its training step, which runs in the scope."""
    with scope:
        model = make().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        x = batch()

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(x)
        loss = scores.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step
