"""Trains a small GPT, byte by byte, on the sources of Python's standard library.

An ordinary PyTorch script: it uses the machine's accelerator if there is one, else the CPU.
The same arguments give the same losses to the last bit, wherever the kernels are the same.

    python examples/train_gpt.py --steps 100 --json result.json
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class Config:
    layers: int
    heads: int
    width: int
    context: int


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "mlp.2.weight")):
                # The scale of the residual stream does not depend on the depth.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy, in nats per byte, of predicting ``targets`` from ``tokens``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library(max_bytes: int) -> tuple[Tensor, Tensor]:
    """The source of the standard library's own modules as bytes: nine of ten files to train on, the rest to
    validate."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for number, path in enumerate(sorted(folder.glob("*.py"))):
        parts[number % 10 == 9].extend(path.read_bytes())
        if len(parts[0]) + len(parts[1]) >= max_bytes:
            break
    train, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return train, validation


def windows(data: Tensor, starts: Tensor, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), length): the targets are the inputs shifted by one byte."""
    rows = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validate(model: GPT, data: Tensor, batches: int, batch: int, context: int, device: torch.device) -> float:
    """The mean loss over windows that are spread evenly over the validation text."""
    starts = torch.linspace(0, len(data) - context - 1, batches * batch, dtype=torch.float64).long()
    losses = [model(*windows(data, part, context, device)).item() for part in starts.split(batch)]
    return math.fsum(losses) / len(losses)


def train(args: argparse.Namespace) -> dict[str, object]:
    device = torch.device(args.device) if args.device else default_device()
    train_data, validation_data = standard_library(args.data_bytes)
    torch.manual_seed(args.seed)
    config = Config(layers=args.layers, heads=args.heads, width=args.width, context=args.context)
    model = GPT(config).to(device)  # made on the CPU, so that every device starts with the same weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, fused=True)
    draws = torch.Generator().manual_seed(args.seed)

    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.1f} M parameters on {device}, {len(train_data) / 1e6:.1f} MB of text", flush=True)
    losses: list[float] = []
    begin = time.perf_counter()
    with tqdm(total=args.steps, desc="training", unit="step") as progress:
        for step in range(args.steps):
            starts = torch.randint(len(train_data) - args.context, (args.batch,), generator=draws)
            inputs, targets = windows(train_data, starts, args.context, device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr)
            optimizer.zero_grad()
            loss = model(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update()
    validation = validate(model, validation_data, args.validation_batches, args.batch, args.context, device)
    seconds = time.perf_counter() - begin
    print(f"validation loss {validation!r} after {args.steps} steps, {seconds:.1f} s", flush=True)
    return {
        "losses": losses,
        "losses_hex": [value.hex() for value in losses],
        "validation_loss": validation,
        "validation_loss_hex": validation.hex(),
        "seconds": seconds,
        "device": str(device),
    }


def default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small GPT, byte by byte, on the sources of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", help="device to train on; without it the accelerator, else the CPU")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=4, help="windows of text a step")
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=6, help="attention heads; they divide the width")
    parser.add_argument("--width", type=int, default=384, help="features a token")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument(
        "--data-bytes", type=int, default=4_000_000, help="stop reading files after this many"
    )
    parser.add_argument("--validation-batches", type=int, default=8, help="batches of validation text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and times there")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} must divide --width {args.width}")
    return args


def main() -> None:
    args = parse_arguments()
    result = train(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
