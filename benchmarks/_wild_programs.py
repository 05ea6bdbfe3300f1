"""Users' programs for bench_plans.py: three kinds of training, as one would write them without this project.

python benchmarks/_wild_programs.py t5 [--steps N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[], Tensor]
#: A module, and a function that makes a batch and computes the loss.
Program = tuple[nn.Module, Loss]

DEVICE = torch.device("cuda")
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def tokens(count: int, *shape: int) -> Tensor:
    return torch.randint(0, count, shape).to(DEVICE)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


@program
def t5() -> Program:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, use_cache=False)
    config.decoder_start_token_id = config.pad_token_id = 0
    model = T5ForConditionalGeneration(config)

    def loss() -> Tensor:
        with autocast():
            out: Tensor = model(input_ids=tokens(32000, 12, 512), labels=tokens(32000, 12, 128)).loss
        return out

    return model, loss


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        found: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Residual(nn.Module):
    """Convolutions with a skip, as in the UNets of diffusion models."""

    def __init__(self, into: int, out: int, heads: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(32, into), nn.SiLU(), nn.Conv2d(into, out, 3, padding=1),
            nn.GroupNorm(32, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1),
        )  # fmt: skip
        self.skip = nn.Conv2d(into, out, 1)
        self.attention = Attention(out, heads) if heads else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.skip(x) + self.body(x)
        if self.attention is not None:
            y = y + self.attention(y.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, y.shape[2:])
        return y


@program
def unet() -> Program:
    class Unet(nn.Module):
        def __init__(self, widths: tuple[int, ...] = (320, 640, 1280, 1280)) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(4, 320, 3, padding=1), nn.Conv2d(320, 4, 3, padding=1)
            pairs = list(zip((320, *widths), widths, strict=False))
            self.down = nn.ModuleList(
                nn.Sequential(Residual(into, out, 8), Residual(out, out, 8)) for into, out in pairs
            )
            self.up = nn.ModuleList(
                nn.Sequential(Residual(2 * out, into, 8), Residual(into, into, 8)) for into, out in pairs
            )

        def forward(self, x: Tensor) -> Tensor:
            x, kept = self.first(x), []
            for stage in self.down:
                kept.append(stage(x))
                x = F.avg_pool2d(kept[-1], 2)
            for stage, skip in zip(reversed(self.up), reversed(kept), strict=True):
                x = stage(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
            found: Tensor = self.last(x)
            return found

    model = Unet()

    def loss() -> Tensor:
        with autocast():
            return F.mse_loss(model(normal(8, 4, 64, 64)).float(), normal(8, 4, 64, 64))

    return model, loss


class Language(nn.Module):
    def __init__(self, mixers: list[nn.Module], width: int, vocabulary: int, heads: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.attention = nn.ModuleList(Attention(width, heads, causal=True) for _ in mixers)
        self.mixers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * len(mixers)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for at, (attention, mixer) in enumerate(zip(self.attention, self.mixers, strict=True)):
            x = x + attention(self.norms[2 * at](x))
            x = x + mixer(self.norms[2 * at + 1](x))
        found: Tensor = self.head(x)
        return found


def next_token(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@program
def experts() -> Program:
    class Experts(nn.Module):
        def __init__(self, count: int = 16) -> None:
            super().__init__()
            self.router = nn.Linear(1024, count)
            self.experts = nn.ModuleList(mlp(1024, 3584) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
            y = torch.zeros_like(flat)
            for at, expert in enumerate(self.experts):
                token, rank = (chosen == at).nonzero(as_tuple=True)
                y.index_add_(0, token, expert(flat[token]) * weights[token, rank, None].to(x.dtype))
            return y.view_as(x)

    model = Language([Experts() for _ in range(8)], 1024, 32000).bfloat16()

    def loss() -> Tensor:
        ids = tokens(32000, 8, 1024)
        return next_token(model(ids), ids)

    return model, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--steps", type=int, default=1 << 30)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with DEVICE:
        model, loss = PROGRAMS[arguments.program]()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    for _ in range(arguments.steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
