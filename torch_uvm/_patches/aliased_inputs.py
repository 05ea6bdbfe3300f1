"""Compiled graphs whose inputs include several labels of the same bytes.

Functionalisation, which the backends of torch.compile rely on, recognises inputs that share bytes by their
storages. Each label has a storage of its own, so a write through one label would not be visible through
another before the graph ends. Therefore each graph checks its inputs on every call. If two of them are
labels of the same bytes, the graph runs as it was recorded, operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_uvm import _C
from torch_uvm._patches.import_hooks import when_imported
from torch_uvm._patches.replace import replace_once


def _checking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(
        self: Any, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        if self.export:
            return plain(self, gm, example_inputs)  # type: ignore[no-any-return]
        as_recorded = gm.forward
        if _C.share_bytes(example_inputs):
            return as_recorded
        compiled = plain(self, gm, example_inputs)

        def run(*inputs: Any) -> Any:
            return (as_recorded if _C.share_bytes(inputs) else compiled)(*inputs)

        return run

    return call_user_compiler


def watch_dynamo() -> None:
    """Patches Dynamo once it is imported; called by `import torch_uvm`. Imports nothing.

    It cannot wait for the first managed tensor: a graph compiled before must look at its inputs, too.
    """
    when_imported(
        "torch._dynamo.output_graph",
        lambda module: replace_once(module.OutputGraph, "call_user_compiler", _checking),
    )
