"""Records the logs of allocations in benchmarks/logs/: a few training steps each, on the emulated
accelerator.

    python benchmarks/record_logs.py [--folder FOLDER] [cnn] [transformer] [ragged]

A log begins before the model is made and ends after it is freed, so every allocation has its free. Sizes and
order are the same in every run; addresses, times and thread numbers differ.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("TORCH_UVM_DEVICE", "emu")  # before torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_uvm

LOGS = Path(__file__).resolve().parent / "logs"
DEVICE = torch.device("emu")
STEPS = 6


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> float:
    loss = F.cross_entropy(model(inputs.to(DEVICE)), labels.to(DEVICE))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    for inputs, labels in batches:
        step(model, optimizer, inputs, labels)


def cnn() -> None:
    """Images of 32 x 32 in batches of 64, three convolutions with batch norm; SGD with momentum."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, optimizer, ((torch.randn(64, 3, 32, 32), torch.randint(10, (64,))) for _ in range(STEPS)))


class Classifier(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        classes: Tensor = self.head(self.encoder(self.tokens(tokens)).mean(1))
        return classes


def transformer() -> None:
    """Sequences of 64 bytes in batches of 32, one layer of width 64; AdamW."""
    model = Classifier().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train(model, optimizer, ((torch.randint(256, (32, 64)), torch.randint(10, (32,))) for _ in range(STEPS)))


class Ragged(nn.Module):
    """Allocates k*16*7*7, k*7*7, k*7, k and k*32 elements for k rows; k varies from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(16, 1, 1)
        self.wide = nn.Linear(7, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:  # (k, 16, 7, 7)
        plane = torch.relu(self.down(x))  # (k, 1, 7, 7)
        column = plane.squeeze(1).amax(2)  # (k, 7)
        gate = torch.sigmoid(column.mean(1))  # (k,)
        classes: Tensor = self.head(torch.relu(self.wide(column)) * gate[:, None])  # (k, 32)
        return classes


def ragged() -> None:
    """Batches of k = 1024 to 8192 images of 16 x 7 x 7, in steps of 1024 and in random order; SGD."""
    model = Ragged().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizes = [1024 * random.randint(1, 8) for _ in range(2 * STEPS)]
    train(model, optimizer, ((torch.randn(k, 16, 7, 7), torch.randint(10, (k,))) for k in sizes))


WORKLOADS: dict[str, Callable[[], None]] = {"cnn": cnn, "transformer": transformer, "ragged": ragged}


def record(name: str, folder: Path) -> int:
    """Records one of WORKLOADS. Returns the count of rows."""
    torch.manual_seed(0)
    random.seed(0)
    with torch_uvm.tools.record_allocations(folder / f"{name}.csv") as recording:
        WORKLOADS[name]()
        gc.collect()
        torch.accelerator.synchronize()
    assert recording.rows is not None
    return recording.rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(WORKLOADS)}; all unless told")
    parser.add_argument("--folder", type=Path, default=LOGS, help="where to write them")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in WORKLOADS]
    if unknown:
        parser.error(f"no workload is called {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    torch_uvm.enable(limit="2GiB", budget=None)
    for name in arguments.names or WORKLOADS:
        rows = record(name, arguments.folder)
        print(f"{name}: {rows} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
