"""Meta kernels as on CUDA, where PyTorch has none or others: they give operators' results their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_uvm._dry import recurrent


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Tensor | Sequence[int], *_: Any
) -> tuple[Tensor, Tensor]:
    steps, batch = log_probs.size(0), log_probs.size(1) if log_probs.dim() == 3 else 1
    if isinstance(target_lengths, Tensor):  # as if all were as long as the padded ones, or alike
        longest = targets.size(1) if targets.dim() == 2 else -(-targets.numel() // batch)
    else:
        longest = max(target_lengths, default=0)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _as_first(given: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(given, memory_format=torch.contiguous_format)


def _as_second(gradient: Tensor, given: Tensor, *_: Any) -> Tensor:
    return _as_first(given)


_KERNELS = {
    "_ctc_loss": _ctc_loss,
    "_ctc_loss.Tensor": _ctc_loss,
    "_ctc_loss_backward": _as_second,
    "_ctc_loss_backward.Tensor": _as_second,
    "_cudnn_rnn": recurrent.forward,
    "_cudnn_rnn_backward": recurrent.backward,
    "_dirichlet_grad": _as_first,
    "_sample_dirichlet": _as_first,
    "_standard_gamma_grad": _as_first,
    "binomial": _as_first,
    "multi_margin_loss_backward": _as_second,
    "multilabel_margin_loss_backward": _as_second,
}


_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


def register() -> None:
    for name, kernel in _KERNELS.items():
        _LIBRARY.impl(name, kernel, allow_override=True)
