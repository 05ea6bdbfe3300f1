"""Recurrent layers: operators of cuDNN on CUDA. Elsewhere PyTorch calls operators for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: By kind, its number in `aten::_cudnn_rnn`, and how many elements it keeps for the backward for one of a
#: layer's results. Another one is kept between two layers (an H200, 2026-11-29).
_KINDS = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 5), "gru": (3, 6)}
RECURRENT = frozenset(getattr(torch, name) for name in _KINDS)
_KEPT = dict(_KINDS.values())


def pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`torch._pack_padded_sequence`: the rows that it takes, and how many sequences have each step."""
    rows = torch.empty(padded.shape[:2])
    sizes = torch._VF._pack_padded_sequence(rows, lengths, batch_first)[1]
    count = int(sizes.sum())
    return padded.flatten(0, 1).index_select(0, torch.arange(count, device=padded.device)), sizes


def run_recurrent(name: str, first: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """`torch.lstm` and the like, of a padded or packed batch, as on CUDA. In autocast it casts as there."""
    packed = isinstance(args[2], (list, tuple))
    sizes = args[0].tolist() if packed else []
    state, weights, biases, layers, dropout, train, both, *rest = args[1:] if packed else args
    batch_first = not packed and rest[0]
    hidden, cell = state if name == "lstm" else (state, None)
    width = (cell if cell is not None else hidden).size(2)
    projected = hidden.size(2) if hidden.size(2) != width else 0
    if torch.is_autocast_enabled(first.device.type):
        dtype = torch.get_autocast_dtype(first.device.type)
        first, hidden = first.to(dtype), hidden.to(dtype)
        cell = None if cell is None else cell.to(dtype)
        weights = [it.to(dtype) for it in weights]
    stride = (4 if biases else 2) + bool(projected)
    mode = _KINDS[name][0]
    given = (first, weights, stride, None, hidden, cell)
    kind: tuple[Any, ...] = (mode, width, projected, layers, batch_first, dropout, train, both, sizes, None)
    output, *states = torch.ops.aten._cudnn_rnn(*given, *kind)[: 3 if name == "lstm" else 2]
    return (output, *states)


def steps_of(args: Sequence[Any]) -> int:
    """How many steps one after another the operator takes, in all layers and directions."""
    given, weights, stride = args[:3]
    at = 10 if isinstance(args[6], int) else 14  # the backward has the results before
    batch_first, sizes = args[at], args[at + 4]
    return int((len(sizes) or given.size(1 if batch_first else 0)) * (len(weights) // stride))


def flops_of(args: Sequence[Any]) -> int:
    """Of the forward."""
    rows = args[0].shape[:-1].numel()
    return int(2 * rows * sum(it.numel() for it in args[1] if it.dim() == 2))


def forward(
    given: Tensor,
    weight: list[Tensor],
    stride: int,
    buffer: Any,
    hidden: Tensor,
    cell: Tensor | None,
    mode: int,
    width: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    """A meta kernel. PyTorch's own keeps nothing for the backward."""
    directions = 2 if both else 1
    output = given.new_empty((*given.shape[:-1], (projected or width) * directions))
    kept = 0
    if train:
        elements = given.shape[:-1].numel() * width * directions
        kept = elements * (_KEPT[mode] * layers + layers - 1) * given.itemsize
    states = (torch.empty_like(hidden), given.new_empty(0) if cell is None else torch.empty_like(cell))
    return output, *states, given.new_empty(kept, dtype=torch.uint8), given.new_empty(0)


def backward(
    given: Tensor,
    weight: list[Tensor],
    stride: int,
    buffer: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """A meta kernel, which PyTorch does not have."""
    of_cell = given.new_empty(0) if cell is None else torch.empty_like(cell)
    return torch.empty_like(given), torch.empty_like(hidden), of_cell, [torch.empty_like(it) for it in weight]
