"""`Tensor.to(managed=)`, and plain calls that move (`enable(moves="alias")`).

`Tensor.to` accepts `managed=` from `import torch_uvm` on. With `enable(moves="alias")` and the switch on,
`Tensor.to`, `.cpu()` and the accelerator's own method (`.cuda()`) move managed tensors. So do `Module.to`,
`.cpu()` and `.cuda()`, which call them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from torch_uvm import _C
from torch_uvm._util.arguments import accelerator, check_flag, resolve_device
from torch_uvm._util.compiler import is_recorded, run_as_it_is

# PyTorch's own, before `managed=` was added to it.
plain_to = torch.Tensor.to

_convert: Callable[..., torch.Tensor]  # moves or copies; given to `accept_managed_keyword`
_alias = False  # the last enable(moves=)


class _Inside(threading.local):
    module = False


_inside = _Inside()


@contextlib.contextmanager
def inside_a_module() -> Iterator[None]:
    """Within it, this thread converts the tensors of a module: a move makes a label that is not a view."""
    before, _inside.module = _inside.module, True
    try:
        yield
    finally:
        _inside.module = before


def moves_for_module() -> bool:
    """Whether this thread converts the tensors of a module."""
    return _inside.module


def _parse(x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call of Tensor.to: device, dtype, copy, non_blocking, memory_format."""
    # PyTorch's parser refuses a positional `copy`: the last argument after a device, a dtype, or a tensor.
    place = 2 if args and isinstance(args[0], (torch.dtype, torch.Tensor)) else 3
    if len(args) == place + 1 and "copy" not in kwargs:
        kwargs["copy"] = args[place]
        args = args[:place]
    copy = kwargs.pop("copy", False)
    check_flag("copy", copy, (True, False))
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, copy, non_blocking, memory_format or torch.preserve_format


def _moves(x: torch.Tensor, device: torch.device | None) -> bool:
    """Whether a plain call for `device` is a move; only managed tensors move."""
    here = accelerator()
    return (
        device is not None
        and here is not None
        and device.type in ("cpu", here.type)
        and (_C.is_managed(x) or is_recorded(x))
        and resolve_device(device) != x.device
    )


@run_as_it_is
@functools.wraps(plain_to)
def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    managed = kwargs.pop("managed", None)
    if managed is None and not (_alias and _C.is_enabled()):
        return plain_to(self, *args, **kwargs)
    check_flag("managed", managed, (True, False, None))
    device, dtype, copy, non_blocking, memory_format = _parse(self, args, dict(kwargs))
    if managed is None and not _moves(self, device):
        return plain_to(self, *args, **kwargs)
    where = self.device if device is None else resolve_device(device)
    return _convert(self, where, dtype, managed, copy, non_blocking, memory_format)


def _allow_uninitialized(call: Callable[..., Any]) -> None:
    """Allows `call` on parameters without a size (nn.LazyLinear), as the replaced method is allowed."""
    UninitializedTensorMixin._allowed_methods.append(call)


def _aliasing(name: str) -> None:
    """Makes `Tensor.name(...)` move when plain calls move; `name` is "cpu" or the accelerator's type."""
    plain = getattr(torch.Tensor, name)

    @run_as_it_is
    @functools.wraps(plain)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (_alias and _C.is_enabled() and (_C.is_managed(self) or is_recorded(self))):
            return plain(self, *args, **kwargs)  # type: ignore[no-any-return]
        # The arguments, in the form of Tensor.to: cpu(memory_format=), or cuda(device=None,
        # non_blocking=False, memory_format=).
        options = dict(kwargs)
        device = torch.device(name)
        if name != "cpu":
            asked = args[0] if args else options.pop("device", None)
            if asked is not None:
                device = resolve_device(asked)
            if len(args) > 1:
                options["non_blocking"] = args[1]
        if device.type != name or len(args) > 2 or (name == "cpu" and args):
            return plain(self, *args, **kwargs)  # type: ignore[no-any-return]  # it raises
        return _to(self, device, **options)

    setattr(torch.Tensor, name, call)
    _allow_uninitialized(call)


def _moving_modules() -> None:
    """Makes `Module.to` and the like move a module's tensors as labels that are not views."""
    plain = torch.nn.Module._apply

    @run_as_it_is
    @functools.wraps(plain)
    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        with inside_a_module():
            return plain(self, fn, recurse)  # type: ignore[no-untyped-call]

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def choose_moves(alias: bool) -> None:
    """Sets what plain calls do from now on: move (`alias`), or copy."""
    global _alias
    if alias:
        if "_apply" not in _wrapped:
            _moving_modules()
            _wrapped.add("_apply")
        here = accelerator()
        for name in ("cpu", *([] if here is None else [here.type])):
            if name not in _wrapped:
                _aliasing(name)
                _wrapped.add(name)
    if alias != _alias and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code has the old meaning of plain calls
    _alias = alias


_wrapped: set[str] = set()


def accept_managed_keyword(convert: Callable[..., torch.Tensor]) -> None:
    """Adds `managed=` to torch.Tensor.to, with the switch on or off; called by `import torch_uvm`.

    Args:
        convert: called with tensor, device, dtype, managed, copy, non_blocking and memory_format.
    """
    global _convert
    _convert = convert
    if torch.Tensor.to is not _to:
        torch.Tensor.to = _to  # type: ignore[method-assign, assignment]
        _allow_uninitialized(_to)
