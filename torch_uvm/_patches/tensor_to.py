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
from torch.overrides import handle_torch_function, has_torch_function_unary

from torch_uvm import _C
from torch_uvm._patches.replace import replace_once
from torch_uvm._util.arguments import accelerator, check_flag, resolve_device
from torch_uvm._util.compiler import is_recorded, run_as_it_is

plain_to: Callable[..., torch.Tensor]  # PyTorch's own, before `managed=` was added to it
_convert: Callable[..., torch.Tensor]  # moves or copies; given to `accept_managed_keyword`
_alias = False  # the last enable(moves=)


class _Inside(threading.local):
    module = False  # whether this thread converts the tensors of a module


inside = _Inside()


@contextlib.contextmanager
def inside_a_module() -> Iterator[None]:
    """Within it, this thread converts the tensors of a module: a move makes a label that is not a view."""
    before, inside.module = inside.module, True
    try:
        yield
    finally:
        inside.module = before


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
def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    managed = kwargs.pop("managed", None)
    if managed is None and (not (_alias and _C.is_enabled()) or has_torch_function_unary(self)):
        return plain_to(self, *args, **kwargs)
    if has_torch_function_unary(self):  # its class calls this again
        this: Any = torch.Tensor.to
        result: torch.Tensor = handle_torch_function(this, (self,), self, *args, **kwargs, managed=managed)
        return result
    check_flag("managed", managed, (True, False, None))
    device, dtype, copy, non_blocking, memory_format = _parse(self, args, dict(kwargs))
    if managed is None and not _moves(self, device):
        return plain_to(self, *args, **kwargs)
    where = self.device if device is None else resolve_device(device)
    return _convert(self, where, dtype, managed, copy, non_blocking, memory_format)


def _aliasing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method that moves when plain calls move; `name` is "cpu" or the accelerator's type."""

    @run_as_it_is
    @functools.wraps(plain)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moves = _alias and _C.is_enabled() and (_C.is_managed(self) or is_recorded(self))
        if not moves or has_torch_function_unary(self):
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

    return call


def _moving_modules(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what `Module.to` and the like call: tensors that move become labels that are not views."""

    @run_as_it_is
    @functools.wraps(plain)
    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        with inside_a_module():
            return plain(self, fn, recurse)

    return apply


def choose_moves(alias: bool) -> None:
    """Sets what plain calls do from now on: move (`alias`), or copy."""
    global _alias
    if alias:
        replace_once(torch.nn.Module, "_apply", _moving_modules)
        here = accelerator()
        for name in ("cpu", *([] if here is None else [here.type])):
            replace_once(torch.Tensor, name, functools.partial(_aliasing, name))
    if alias != _alias and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code has the old meaning of plain calls
    _alias = alias


def _managing(plain: Callable[..., Any]) -> Callable[..., Any]:
    global plain_to
    plain_to = plain
    return _to


def accept_managed_keyword(convert: Callable[..., torch.Tensor]) -> None:
    """Adds `managed=` to torch.Tensor.to, with the switch on or off; called by `import torch_uvm`.

    Args:
        convert: called with tensor, device, dtype, managed, copy, non_blocking and memory_format.
    """
    global _convert
    _convert = convert
    replace_once(torch.Tensor, "to", _managing)
