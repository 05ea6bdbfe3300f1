"""Trains on images that numpy prepares and the accelerator reads: the same bytes, never copied.

An image is a page of a source file of the standard library: rows are lines, columns are characters, and a
character's code is its brightness. The task: does the page belong to Python's own tests? Between epochs numpy
shuffles and rotates the images in place, under the tensor's CPU label. The network reads them under its
device label. For comparison the same training also runs with a numpy array and a copy of it for the device.
Both have equal losses to the last bit. Raises an error if a byte of the images was copied.

    python examples/both_sides.py --epochs 12 --images 1536

Needs numpy besides torch. On a machine with no GPU it runs on the emulated accelerator.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from _pages import COLUMNS, LINES, Floats, Labels, augment, draw, normalise, read_pages
from demo import format_bytes, format_table
from torch import Tensor, nn

import torch_uvm

BATCH = 64


def check_same_bytes(host: Tensor, device: Tensor, array: Floats) -> None:
    """Raises AssertionError unless the three share the same bytes."""
    addresses = (host.data_ptr(), device.data_ptr(), int(array.__array_interface__["data"][0]))
    if len(set(addresses)) != 1 or not torch_uvm.is_managed(host) or not torch_uvm.is_managed(device):
        raise AssertionError(
            f"a copy: {host.device} at {addresses[0]:#x}, {device.device} at {addresses[1]:#x}, "
            f"numpy at {addresses[2]:#x}; wanted: managed memory, one address"
        )


def counters(device: torch.device) -> dict[str, int]:
    """The counters of the emulated accelerator. Other accelerators have none."""
    return torch_uvm.emulated.counters() if device.type == "emu" else {}


@contextmanager
def nothing_copied(device: torch.device) -> Iterator[None]:
    """Raises AssertionError if its body allocates managed memory or copies a byte across the link."""

    def figures() -> dict[str, int]:
        copied = {key: value for key, value in counters(device).items() if key.startswith("bytes_copied_")}
        return copied | {"managed bytes": torch_uvm.memory.memory_allocated()}

    before = figures()
    yield
    grown = {key: value - before[key] for key, value in figures().items() if value != before[key]}
    if grown:
        raise AssertionError(f"a copy: {grown}; wanted: nothing grows")


class Images(Protocol):
    """A set of images, (count, 1, LINES, COLUMNS), that numpy and the accelerator use alternately."""

    def for_numpy(self) -> Floats: ...
    def for_device(self) -> Tensor: ...


class Ordinary:
    """A numpy array, and a copy of it each time that the device reads what numpy wrote."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.array: Floats = np.empty((count, 1, LINES, COLUMNS), dtype=np.float32)
        self.device = device

    def for_numpy(self) -> Floats:
        return self.array

    def for_device(self) -> Tensor:
        return torch.from_numpy(self.array).to(self.device)


class Managed:
    """One managed tensor with two labels."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.host = torch_uvm.memory.empty(count, 1, LINES, COLUMNS, dtype=torch.float32, device="cpu")
        self.there = torch_uvm.to(self.host, device)
        self.device = device

    def for_numpy(self) -> Floats:
        with nothing_copied(self.device):
            # Waits for the device's pending work on these bytes. When it returns, numpy may write. With
            # non_blocking=True it would not wait, and numpy would race with the device until
            # torch.accelerator.synchronize() or an event after the last batch.
            self.host = torch_uvm.to(self.there, "cpu")
            array: Floats = self.host.numpy()
        check_same_bytes(self.host, self.there, array)
        return array

    def for_device(self) -> Tensor:
        with nothing_copied(self.device):
            # numpy's calls are synchronous, so there is nothing to wait for. The move starts a prefetch of
            # the range.
            self.there = torch_uvm.to(self.host, self.device)
        check_same_bytes(self.host, self.there, self.host.numpy())
        return self.there


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, size in ((1, 16, 5), (16, 32, 3), (32, 32, 3)):
        layers += [
            nn.Conv2d(inputs, outputs, size, stride=2, padding=size // 2),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AvgPool2d((LINES // 8, COLUMNS // 8)), nn.Flatten(), nn.Linear(32, 2))


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> list[float]:
    """Trains one epoch. Returns the loss of each step."""
    model.train()
    losses = []
    for batch, answers in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), answers)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = [
        (model(batch).argmax(1) == answers).sum().item()
        for batch, answers in zip(images.split(BATCH), labels.split(BATCH), strict=True)
    ]
    return float(sum(right)) / len(labels)


@dataclass(frozen=True)
class Result:
    """Losses, accuracy and counters of a whole training."""

    losses: list[float]  # one per step
    accuracy: float  # on held-out pages
    baseline: float  # accuracy of always giving the most frequent answer
    seconds: float
    addresses: tuple[int, int]  # of the images: in numpy, on the device
    image_bytes: int
    peak_managed: int
    peak_device: int
    counted: dict[str, int]

    @property
    def numpy_bytes(self) -> int:
        """Bytes of numpy's array, if it does not share the tensor's bytes."""
        return self.image_bytes if self.addresses[0] != self.addresses[1] else 0


def train(way: type[Ordinary] | type[Managed], epochs: int, count: int, seed: int) -> Result:
    """Makes the images, and trains on them from the device with numpy's augmentation in between."""
    device = accelerator()
    sets = read_pages(count, seed)
    pages, size = sets[0] + sets[1], len(sets[0])
    labels: Labels = np.array([page.is_test for page in pages], dtype=np.int64)
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = network().to(device)  # made on the CPU, so that every device starts with the same weights
    optimizer = torch.optim.AdamW(model.parameters())
    torch.accelerator.synchronize()
    # Cached memory of the previous training would reduce the memory of this one.
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch_uvm.memory.reset_peak_memory_stats()
    before, begin = counters(device), time.perf_counter()

    images: Images = way(count, device)
    array = images.for_numpy()
    for page, image in zip(pages, array, strict=True):
        draw(page, image[0])
    normalise(array, size)

    def epoch(number: int) -> tuple[list[float], float, int]:
        """A function, so that its device tensors are freed before the next epoch makes its copies."""
        augment(images.for_numpy()[:size], labels[:size], random)
        there = images.for_device()
        answers = torch.from_numpy(labels).to(device)  # small, and copied in both variants
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + math.cos(math.pi * number / epochs)) / 2
        losses = train_epoch(model, optimizer, there[:size], answers[:size])
        return losses, accuracy(model, there[size:], answers[size:]), there.data_ptr()

    done = [epoch(number) for number in range(epochs)]
    frequent = max(np.bincount(labels[size:])) / len(labels[size:])
    return Result(
        losses=[loss for losses, _, _ in done for loss in losses],
        accuracy=done[-1][1],
        baseline=float(frequent),
        seconds=time.perf_counter() - begin,
        addresses=(int(array.__array_interface__["data"][0]), done[-1][2]),
        image_bytes=array.nbytes,
        peak_managed=torch_uvm.memory.max_memory_allocated(),
        peak_device=torch.accelerator.max_memory_allocated(),
        counted={key: value - before[key] for key, value in counters(device).items()},
    )


def accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator()
    if device is None:
        sys.exit("there is no accelerator, and torch_uvm registered none")
    return device


def check_results(ordinary: Result, managed: Result, epochs: int) -> None:
    """Raises AssertionError unless both losses are equal and only the ordinary variant copied the images."""
    size = managed.image_bytes
    if managed.losses != ordinary.losses or managed.accuracy != ordinary.accuracy:
        raise AssertionError(f"losses differ: {ordinary.losses} and {managed.losses}")
    if not size <= managed.peak_managed < 2 * size:
        raise AssertionError(
            f"{managed.peak_managed} managed bytes at the peak for images of {size}; wanted: once"
        )
    if managed.counted:
        spared = ordinary.counted["bytes_copied_to_device"] - managed.counted["bytes_copied_to_device"]
        if spared != epochs * size:
            raise AssertionError(f"{spared} bytes were not copied; wanted: {size} in each of {epochs} epochs")


def figures(result: Result) -> dict[str, str]:
    """A training as a column of the table: measured figures first, then the emulator's modelled ones."""
    column = {
        "held-out accuracy": f"{result.accuracy:.4f}",
        "always the same answer": f"{result.baseline:.4f}",
        "last loss": repr(result.losses[-1]),
        "wall time": f"{result.seconds:.1f} s",
        "address for numpy": f"{result.addresses[0]:#x}",
        "address for the device": f"{result.addresses[1]:#x}",
        "numpy's own copy of the images": format_bytes(result.numpy_bytes),
        "peak managed memory": format_bytes(result.peak_managed),
        "peak device memory, managed included": format_bytes(result.peak_device),
    }
    if result.counted:
        migrated = result.counted["bytes_to_device"] + result.counted["bytes_to_host"]
        column |= {
            "copied to the device": f"{result.counted['bytes_copied_to_device']:,} B",
            "copied to the host": f"{result.counted['bytes_copied_to_host']:,} B",
            "migrated by page, both ways": format_bytes(migrated),
        }
    return column


def at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number}; accepted: at least {least}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=partial(at_least, 1), default=12, help="default: %(default)s")
    parser.add_argument(
        "--images", type=partial(at_least, 8), default=1536, help="16 KiB each, default: %(default)s"
    )
    parser.add_argument("--seed", type=partial(at_least, 0), default=0, help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    # Required by CUDA for deterministic algorithms.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device = accelerator()
    if device.type == "emu":
        # With a seed, queued work is delayed at random, so a missing wait would change the losses.
        torch_uvm.emulated.configure(memory="96MiB", seed=options.seed)
    ordinary = train(Ordinary, options.epochs, options.images, options.seed)
    managed = train(Managed, options.epochs, options.images, options.seed)
    size = format_bytes(managed.image_bytes)
    print(f"{options.images} images, {size}, on {device}; {options.epochs} epochs\n")
    print(format_table({"copies": figures(ordinary), "moves": figures(managed)}))
    check_results(ordinary, managed, options.epochs)
    print("\nAll losses are equal to the last bit, and no byte of the images was copied.")
    if device.type == "emu":
        print("Migrated bytes are modelled, without what numpy's touches migrate: the emulator sees none.")


if __name__ == "__main__":
    main()
