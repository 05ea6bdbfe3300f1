"""A row of the CUDA benchmarks, a wrapper that sets the switch around a call, and emptied caches between
rows."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import torch_uvm

KIB, MIB, GIB = 1024, 1024**2, 1024**3


@dataclass
class Row:
    """One figure. `goal` is its target, `predicted` an earlier measurement by hand on an H200."""

    name: str
    value: float
    unit: str
    goal: str = ""
    predicted: str = ""


Section = Callable[[], list[Row]]


def size_name(count: int) -> str:
    for unit, word in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {word}"
    return f"{count} B"


def scope(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch_uvm.enabled() if on else torch_uvm.disabled()


def clean() -> None:
    gc.collect()
    give_back()


def give_back() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch_uvm.empty_cache()


def rate(count: int, seconds: float) -> float:
    return count / seconds / 1e9
