"""Registry of small programs. A program takes a device, and its results are the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Results = list[Any]  # tensors, and plain values
Program = Callable[[str], Results]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def three(device: str) -> list[str]:
    return ["cpu"] * 3 if device == "cpu" else [f"{device}:{index}" for index in range(3)]


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
