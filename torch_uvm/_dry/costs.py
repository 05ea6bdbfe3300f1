"""How long an operator takes on a card: a roofline of its arithmetic and its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils import flop_counter

from torch_uvm._dry.recurrent import flops_of, steps_of
from torch_uvm._tools.cards import Card
from torch_uvm._util.containers import tensors_of


@dataclass(frozen=True)
class Work:
    """What an operator does.

    Args:
        kind: "matmul", "convolution", "grouped_convolution", "recurrent", "attention", or "" for all that has
            no formula.
        dtype: the name of a rate of `Card.flops`.
        serial_us: of steps that wait for each other, whatever the card's rates.
        launches: how many kernels it has.
    """

    kind: str
    dtype: str
    flops: int
    bytes: int
    serial_us: float = 0.0
    launches: int = 1


_KINDS = (("attention", "attention"), ("conv", "convolution"), ("cudnn_rnn", "recurrent"))
#: Operators that use as many rows of their first tensor as they return, or are given.
_ROWS = ("aten::embedding", "aten::index_select", "aten::index", "aten::gather")
#: Arguments that are written and not read.
_ONLY_WRITTEN = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_")
#: How often an operator moves its bytes, where that is more than once: it reads its operands twice, adds into
#: float32, or adds atomically. Fits the H200's traces in benchmarks/traces.
_PASSES = (
    ("_scaled_dot_product", "backward", 3.0),
    ("_norm", "", 2.0),
    ("_safe_softmax", "", 3.5),
    ("convolution", "", 1.3),
    ("aten::index_add_", "", 3.6),
    ("aten::index", "", 1.3),
)
#: More passes of a convolution whose tensors are not channels last: cuDNN changes their format, and back.
#: This and the figures below fit single operators on an H200, 2026-11-29.
_OTHER_FORMAT = 3.5
#: Causal attention computes half of all pairs of positions, and this part of a row in addition: whole blocks.
_DIAGONAL = 450
#: Tensor cores take so many bytes of channels at a time.
_CHANNELS = 128
#: Microseconds that a thread takes for an element, where each walks along a dimension: forward, backward.
_SOFTMAX_US = (1.2, 0.54)
#: Microseconds for an element of a channel, which few threads share, and how many channels run at once: of
#: instance norm in bfloat16, which is a batch norm of one sample, and not cuDNN's.
_CHANNEL_US, _CHANNELS_AT_ONCE = 1.6e-3, 264
#: Microseconds of a step in one direction of a layer: forward, backward.
_RECURRENT_US = (16.0, 24.0)
#: Bytes a second of copies of pageable memory: to the device, and into new memory of the host.
_PAGEABLE_INTO, _PAGEABLE_OUT = 6.6e9, 1.4e9
#: Kernels of operators that sort, or count before they write. From the sources of PyTorch 2.11.
_LAUNCHES = {
    "aten::nonzero": 6,
    "aten::masked_select": 7,
    "aten::index_put": 14,
    "aten::index_put_": 14,
    "aten::embedding_dense_backward": 12,
}
_BY_MASK = 6  # of `index` with a mask, in addition
#: Parts of the rate, or of the efficiency of the same kind.
_PARTS = {"grouped_convolution": 0.06, "recurrent": 0.5}
_BACKWARD_PART = 0.6  # of convolutions


def used_bytes(tensor: Tensor) -> int:
    """Bytes that the tensor's elements have in memory: expanded dimensions count once."""
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        count *= size if stride != 0 else min(size, 1)
    return count * tensor.itemsize


def work_of(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: Any,
    written: Iterable[Tensor],
    unknown: bool = False,
) -> Work:
    """The arithmetic and the traffic of one operator.

    FLOPs are those of `torch.utils.flop_counter`, about half of them for causal attention; 0 where it has no
    formula. Bytes are those of the operands and results, each once; what is updated counts twice.

    Args:
        written: the operands that the operator writes to.
        unknown: the shape of its result depends on values.
    """
    name = op.name().partition(".")[0]
    flops = _flops(op, args, kwargs, results)
    kind = next((kind for part, kind in _KINDS if part in name), "matmul") if flops else ""
    if kind == "convolution" and _groups(op, args) > 1:
        kind = "grouped_convolution"
    operands = tensors_of(args, kwargs)
    seen = {id(it) for it in operands}
    fresh = sum(used_bytes(it) for it in tensors_of(results) if id(it) not in seen)
    updated = sum(used_bytes(it) for it in written)
    moved: float
    if name in _ROWS:
        moved = 2 * fresh + sum(used_bytes(it) for it in operands[1:])
    elif name == "aten::index_add_":
        # Of the target, the rows that are added to: as many as the source has.
        moved = 3 * used_bytes(operands[-1])
    elif name in _ONLY_WRITTEN:
        moved = sum(used_bytes(it) for it in operands)
    elif name.startswith("aten::nll_loss"):
        moved = fresh  # of the scores, an element a row
    else:
        moved = sum(used_bytes(it) for it in operands) + updated + fresh
    passes = next((it for part, other, it in _PASSES if part in name and other in name), 1.0)
    if kind == "convolution":
        weight = args[2 if "backward" in name else 1]
        if weight.shape[2:].numel() == 1:
            passes = 1.0
        elif suggest_memory_format(args[0]) == torch.contiguous_format:
            passes += _OTHER_FORMAT
        bytes_of_channels = weight.shape[1] * weight.itemsize
        flops = flops * (-bytes_of_channels % _CHANNELS + bytes_of_channels) // bytes_of_channels
        if "backward" in name:
            flops = int(flops / _BACKWARD_PART)
    rate, serial_us = _rate_of(kind, operands), _serial_us(name, args)
    launches = _LAUNCHES.get(name, 1) + (_BY_MASK if unknown and name == "aten::index" else 0)
    return Work(kind, rate, flops, int(passes * moved), serial_us, launches)


def _serial_us(name: str, args: tuple[Any, ...]) -> float:
    backward = int("backward" in name)
    if name.startswith("aten::_cudnn_rnn"):
        return _RECURRENT_US[backward] * steps_of(args)
    if "softmax" in name and "safe" not in name and "_fused" not in name:
        tensor, at = args[0], args[1 + backward]
        is_last = at in (-1, tensor.dim() - 1)
        return 0.0 if is_last or tensor.dim() == 0 else float(_SOFTMAX_US[backward] * tensor.size(at))
    if name.startswith("aten::native_batch_norm"):
        count, channels = args[0].shape[:2]
        if count == 1 and args[0].dtype == torch.bfloat16:
            return float(_CHANNEL_US * args[0].numel() / channels * math.ceil(channels / _CHANNELS_AT_ONCE))
    return 0.0


def precision() -> tuple[str, bool]:
    """The settings that decide at which rate float32 is computed."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def device_us(work: Work, card: Card) -> float:
    """Microseconds on the device."""
    seconds = work.bytes / (card.memory_rate * card.efficiency.get("memory", 1.0))
    if work.flops:
        rate = card.flops.get(work.dtype) or card.flops["float32"]
        kind = "convolution" if "convolution" in work.kind else work.kind
        rate *= _PARTS.get(work.kind, 1.0)
        arithmetic = work.flops / (rate * card.efficiency.get(kind, 1.0))
        seconds = seconds + arithmetic if work.kind == "convolution" else max(seconds, arithmetic)
    return max(seconds * 1e6, work.serial_us) + work.launches * card.launch_us


def copy_us(work: Work, card: Card, to_host: bool, pinned: bool) -> float:
    """Microseconds of a copy across the link."""
    rate, pageable = (card.out, _PAGEABLE_OUT) if to_host else (card.into, _PAGEABLE_INTO)
    return work.bytes / 2 / (rate if pinned else min(rate, pageable)) * 1e6 + card.launch_us


def _groups(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> int:
    named = zip(op._schema.arguments, args, strict=False)
    return next((int(value) for argument, value in named if argument.name == "groups"), 1)


def _rate_of(kind: str, operands: list[Tensor]) -> str:
    dtype = next((it.dtype for it in operands if it.dtype.is_floating_point), torch.float32)
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return "float8"
    if name != "float32" or not kind:
        return name
    if kind == "grouped_convolution":
        return name  # not by tensor cores
    matmul, cudnn_in_tf32 = precision()
    in_tf32 = cudnn_in_tf32 if kind in ("convolution", "recurrent") else matmul != "highest"
    return "tf32" if in_tf32 else name


def _flops(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any) -> int:
    name = op.name()
    if "_scaled_dot_product_" in name:
        return _attention(name, args, kwargs)
    if name.startswith("aten::convolution_backward"):
        return _convolution_backward(args)
    if name.startswith("aten::_cudnn_rnn"):
        return flops_of(args) * (2 if "backward" in name else 1)
    count = flop_counter.flop_registry.get(op.overloadpacket)
    return int(count(*args, **kwargs, out_val=results)) if count is not None else 0


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """The forward's, for each of the two gradients. The library's formula takes groups for one."""
    gradient, given, weight = (it.shape for it in args[:3])
    transposed = bool(args[7])
    forward = flop_counter.conv_flop_count(given, weight, gradient, transposed=transposed)
    return int(forward) * sum(map(bool, args[10][:2]))


def _attention(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    backward = "backward" in name
    tensors = args[:4] if backward else args[:3]
    shapes = [it.shape for it in tensors]
    query, key, value = shapes[-3:]
    if key[1] != query[1]:  # grouped queries
        key, value = (torch.Size((it[0], query[1], *it[2:])) for it in (key, value))
    if backward:
        flops = flop_counter.sdpa_backward_flop_count(shapes[0], query, key, value)
    else:
        flops = flop_counter.sdpa_flop_count(query, key, value)
    is_causal = any(it is True for it in (*args, *kwargs.values()))
    return int(flops * (min(1.0, 0.5 + _DIAGONAL / query[2]) if is_causal else 1.0))
