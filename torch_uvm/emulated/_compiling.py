"""torch.compile on the emulated accelerator: inductor, which has no code generator for it, says so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch


def _is_emulated(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_is_emulated(it) for it in value)
    device = value.device if isinstance(value, torch.Tensor) else value
    return isinstance(device, torch.device) and device.type == "emu"


def refuse_inductor(module: ModuleType) -> None:
    """Has inductor's entry point, of ``torch._inductor.compile_fx``, refuse graphs with tensors of `emu`."""
    plain = module.compile_fx

    @functools.wraps(plain)
    def compile_fx(model_: Any, example_inputs_: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        nodes = model_.graph.nodes if isinstance(model_, torch.fx.GraphModule) else ()
        made = (node.meta.get("example_value", node.meta.get("val")) for node in nodes)
        if any(map(_is_emulated, [*example_inputs_, *made])):
            raise RuntimeError(
                "inductor generates no code for the emulated accelerator 'emu'; accepted there: "
                'torch.compile(..., backend="aot_eager") or backend="eager"'
            )
        return plain(model_, example_inputs_, *args, **kwargs)

    module.__dict__["compile_fx"] = compile_fx
