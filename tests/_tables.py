"""Helpers for tests of PyTorch's tables of operators and modules: values on a device, equality of bits."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# TORCH_UVM_TEST_TABLES=all tests all samples of each entry instead of a few. Takes minutes.
ALL_SAMPLES = os.environ.get("TORCH_UVM_TEST_TABLES") == "all"


def some(samples: Iterable[T], name: str, most: int) -> list[T]:
    """The first sample, and others chosen by a hash of `name`, so that each run takes the same ones."""
    if ALL_SAMPLES:
        return list(samples)
    first = list(islice(samples, 4 * most))
    others = sorted(range(1, len(first)), key=lambda i: zlib.crc32(f"{name} {i}".encode()))
    return [first[i] for i in sorted([0, *others[: most - 1]])] if first else []


def seed(number: int) -> None:
    """Seeds the generators of the CPU and of `emu`. torch.manual_seed also formats the stack for each kind of
    accelerator that is absent, which takes longer than most operators here."""
    torch.default_generator.manual_seed(number)
    torch.emu.manual_seed_all(number)  # type: ignore[attr-defined]


def on_device(value: Any) -> Any:
    """A copy of the value with every tensor on `emu`. Tensors keep `requires_grad`."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("emu").requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_device, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_device, value))
    if isinstance(value, dict):
        return {key: on_device(item) for key, item in value.items()}
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("emu")
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have equal bits. NaNs of any pattern are equal. Sparse tensors are compared by
    part."""
    if left.layout == right.layout == torch.sparse_coo:
        alike = (left.shape, left.is_coalesced()) == (right.shape, right.is_coalesced())
        parts = [(x._indices(), x._values()) for x in (left, right)]
        return alike and all(map(same_bits, *parts))
    left = left.detach().resolve_conj().resolve_neg()
    right = right.detach().cpu().resolve_conj().resolve_neg()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if left.is_floating_point():
        signs_alike = torch.equal(left.signbit() & ~left.isnan(), right.signbit() & ~right.isnan())
        return signs_alike and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    return torch.equal(left, right)


def backward(results: list[torch.Tensor]) -> bool:
    """Backward from the sum of results that require a gradient; False if none does."""
    wanted = [result for result in results if result.requires_grad]
    if wanted:
        parts = [(torch.view_as_real(r) if r.is_complex() else r).sum() for r in wanted]
        torch.stack([part.double() for part in parts]).sum().backward()
    return bool(wanted)
