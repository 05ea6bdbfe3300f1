"""Compiled graphs in pieces, so that a budget need not hold all that a graph uses at once.

Dynamo's graph is split before Inductor gets it, as PyTorch splits graphs for DistributedDataParallel, but by
all bytes that a piece uses first, not by those of parameters alone. Each piece has a forward and a backward
graph of its own, and what it saves for its backward may leave meanwhile. Kernels are not fused across pieces,
so results may be rounded differently.

Imports Dynamo: only a graph's compilation imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.distributed import Bucket, DDPOptimizer

from torch_uvm import _C

#: Of the budget, for a piece: while it runs, the next one's bytes are fetched and the last one's leave.
_SHARE = 10


def most_bytes(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> int | None:
    """How many bytes a piece of a graph with these inputs may use; None: it is not split."""
    if not hasattr(graph, "compile_subgraph_reason"):
        return None  # not Dynamo's: exported, or traced
    if any(getattr(node.target, "__name__", "").startswith("_foreach_") for node in graph.graph.nodes):
        return None  # an optimizer: each of its operators uses all parameters, so each would be a piece
    for each in inputs:
        if isinstance(each, torch.Tensor) and each.device.type not in ("cpu", "meta"):
            budget = _C.budget_of(each.device.index)
            return None if budget is None else budget // _SHARE
    return None


def compile_pieces(graph: Any, inputs: Sequence[Any], most: int, compiler: Callable[..., Any]) -> Any:
    """Compiles the graph in pieces of about `most` bytes. A graph of fewer is compiled as it is.

    Args:
        graph: of Dynamo, with the values' fake tensors.
        compiler: of a graph and its inputs.
    """
    return _Splitter(graph, most, compiler).compile_fn(graph, list(inputs))


def _storage_of(value: object) -> int | None:
    """Identifies the storage of a value of the graph; None: it has none."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


class _Splitter(DDPOptimizer):
    def __init__(self, graph: Any, most: int, compiler: Callable[..., Any]) -> None:
        super().__init__(most, compiler, first_bucket_cap=most)
        values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
        parameters = [each for each in values if isinstance(each, torch.nn.Parameter)]
        self._with_gradient = {_storage_of(each) for each in parameters if each.requires_grad}
        self._counted: set[int | None] = {None}

    def add_param_args(self, bucket: Bucket, node: torch.fx.Node) -> None:
        for each in (node, *node.all_input_nodes):
            bucket.size += self._new_bytes(each.meta.get("example_value"))

    def _new_bytes(self, value: Any) -> int:
        """Bytes of a value's storage that were not counted yet, with those of a parameter's gradient."""
        if isinstance(value, (tuple, list)):
            return sum(self._new_bytes(each) for each in value)
        storage = _storage_of(value)
        if storage in self._counted:
            return 0
        self._counted.add(storage)
        count: Any = value.untyped_storage().nbytes()
        if isinstance(count, torch.SymInt):  # its hint: `int` would guard on it
            count = count.node.hint or 0
        return int(count) * (2 if storage in self._with_gradient else 1)
