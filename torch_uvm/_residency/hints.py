"""Hints: where the bytes of tensors should be. No hint changes what a program computes.

Each hint takes a tensor, a module (its parameters and buffers), an optimizer (the tensors of its state), or
nested lists, tuples and mappings of them. It affects whole pages that belong to these tensors alone, never a
page with bytes of another tensor. Small tensors share pages, so a hint for one alone may do nothing.
Adjacent ranges are joined, so a hint for a whole module makes fewer and larger calls.

Tensors that are not managed are skipped; if the argument itself is such a tensor, that is an error. If an
error is raised, nothing has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from torch_uvm import _C
from torch_uvm._util.arguments import Device, accelerator, exact_keywords, resolve_device, show
from torch_uvm._util.containers import managed_tensors_in, tensors_in

#: The argument of the hints; nested containers are accepted, too.
Hinted: TypeAlias = "torch.Tensor | torch.nn.Module | torch.optim.Optimizer | Sequence[Any] | dict[Any, Any]"


for _hint in ("prefetch", "advise", "discard"):
    torch.library.register_fake(f"torch_uvm::{_hint}", lambda *args, **kwargs: None)
# These operators return nothing and write nothing, so a compiler would remove them as dead code.
for _operator in (torch.ops.torch_uvm.prefetch.default, torch.ops.torch_uvm.advise.default):
    torch.fx.node.has_side_effect(_operator)


def _check_stream(stream: object) -> list[int] | None:
    if stream is None:
        return None
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"stream is {show(stream)}; accepted: a torch.Stream, or None")
    here = accelerator()
    if here is None or stream.device.type != here.type:
        raise ValueError(f"stream is one of {stream.device}; accepted: a stream of the accelerator, {here}")
    return [stream.stream_id, stream.device_index, stream.device_type]


def _location(device: Any, what: str) -> int:
    """The location as the runtime numbers it: -1 is the host."""
    meant = resolve_device(device, what)
    return -1 if meant.type == "cpu" else meant.index


@exact_keywords
def prefetch(x: Hinted, device: Device | None = None, *, stream: torch.Stream | None = None) -> None:
    """Starts moving the bytes of managed tensors to `device`, before they are used there.

    The call does not wait, and no label changes: code that uses the tensors meanwhile sees the right bytes.
    Tensors that are not managed are skipped. If an error is raised, nothing has been moved.

    Args:
        x: a tensor of any shape, a module, an optimizer, or nested lists, tuples and mappings of them.
        device: the destination: a torch.device (the CPU, too), a string, or the accelerator's index. None:
            each tensor's own device.
        stream: the stream that the transfer is ordered after. None: the current stream of `device`; for the
            CPU, the current stream of the device that has the bytes.

    Raises:
        TypeError: something in `x` is not accepted (the message names its place); `stream` is not a stream.
        ValueError: `x` is a tensor that is not managed; an unknown device; a stream of another device type.

    >>> x = torch_uvm.memory.zeros(1 << 20, device="cpu")
    >>> torch_uvm.prefetch(x, 0)
    >>> torch_uvm.residency(x)
    {device(type='emu', index=0): 4194304}
    """
    tensors = managed_tensors_in(x, "prefetch")
    target = None if device is None else resolve_device(device)
    order = _check_stream(stream)
    if tensors:
        torch.ops.torch_uvm.prefetch(tensors, target, stream=order)


@exact_keywords
def advise(
    x: Hinted,
    read_mostly: bool | None = None,
    preferred_location: Device | None | EllipsisType = ...,
    accessed_by: Device | Sequence[Device] | None | EllipsisType = ...,
) -> None:
    """Tells the driver how managed tensors will be used, until they are freed.

    An argument that is left out changes nothing. `x` and errors are as those of `prefetch`.

    Args:
        read_mostly: True: each reader may get its own copy of a page; a write drops the copies. False undoes
            it.
        preferred_location: the device, or the CPU, whose memory the pages should be in; a fault from
            elsewhere maps them if possible. None undoes it.
        accessed_by: a device, or a sequence of them, that keeps a mapping of the pages, so that its accesses
            do not fault. Replaces those named before. None or () undoes it.

    >>> torch_uvm.advise(torch_uvm.memory.zeros(1 << 20), read_mostly=True, accessed_by="cpu")
    """
    tensors = managed_tensors_in(x, "advise")
    if read_mostly is not None and not isinstance(read_mostly, bool):
        raise TypeError(f"read_mostly is {show(read_mostly)}; accepted: True, False, None")
    preferred: list[int] | None = None
    if preferred_location is not ...:
        preferred = (
            [] if preferred_location is None else [_location(preferred_location, "preferred_location")]
        )
    accessing: list[int] | None = None
    if accessed_by is None:
        accessing = []
    elif isinstance(accessed_by, (list, tuple)):
        named = [_location(one, f"accessed_by[{index}]") for index, one in enumerate(accessed_by)]
        accessing = list(dict.fromkeys(named))
    elif accessed_by is not ...:
        accessing = [_location(accessed_by, "accessed_by")]
    if tensors and not (read_mostly is None and preferred is None and accessing is None):
        torch.ops.torch_uvm.advise(
            tensors, read_mostly=read_mostly, preferred_location=preferred, accessed_by=accessing
        )


@exact_keywords
def discard(x: Hinted) -> None:
    """Declares the contents of managed tensors unneeded, so that moving them costs nothing.

    The values are undefined until they are written again. To autograd it is a write: it increments the
    version counters, and a leaf that requires grad refuses it outside `torch.no_grad()`. It is ordered on
    the current stream; under the CPU's label it is complete when the call returns. On CUDA the pages are
    moved to the label's side, to be written there (docs/hardware.md). `x` and other errors are as those of
    `prefetch`.

    Raises:
        RuntimeError: a write in place would raise: a leaf that requires grad, an inference tensor.

    >>> scratch = torch_uvm.memory.ones(1 << 20)
    >>> torch_uvm.discard(scratch)
    >>> scratch.zero_().sum().item()
    0.0
    """
    tensors = managed_tensors_in(x, "discard")
    if tensors:
        torch.ops.torch_uvm.discard(tensors)


@exact_keywords
def residency(t: Hinted) -> dict[torch.device, int]:
    """Where the library last put the bytes of a tensor. Later migrations by page faults are not visible.

    A tensor that is not managed is where its label says. Bytes that several tensors share count once; a view
    counts only the bytes of its elements. For a tensor with more than 65536 separate runs of bytes, the
    split among places is an estimate.

    Args:
        t: a tensor of any shape, or any other argument of the hints; then the result is the sum.

    Returns:
        bytes by torch.device; devices without bytes of it are left out.

    Raises:
        TypeError: something in `t` is not accepted; the message names its place.
        ValueError: `t` is a tensor with no bytes of its own (meta, sparse, a wrapper around others).

    >>> torch_uvm.residency(torch_uvm.memory.zeros(256))
    {device(type='emu', index=0): 1024}
    """
    if isinstance(t, torch.Tensor) and not _C.has_bytes(t):
        raise ValueError(
            f"residency() of a tensor of layout {t.layout} on {t.device} ({type(t).__name__}); "
            f"accepted: strided tensors with memory of their own"
        )
    return _C.residency([one for one in tensors_in(t, "residency") if _C.has_bytes(one)])
