"""Compiled graphs in pieces. `aot_eager` stands for Inductor, which has no kernels for `emu`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_uvm
from torch_uvm._patches import compiled_graphs, graph_pieces

MIB = 1024**2
DEVICE = torch.device("emu", 0)
BLOCK_BYTES = 12 * 64 * 64 * 4  # of the parameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, 64))
        found: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return found


class Network(nn.Module):
    """Tied weights, statistics that the forward writes, and checkpoints if wanted."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(100, 64), nn.BatchNorm1d(64)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.embedding(x).flatten(0, 1)).view(*x.shape, 64)
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False) if self.checkpoints else block(y)
        return F.cross_entropy(self.head(y[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["plain", "checkpoints", "autocast", "dynamic"])
def test_bits_are_those_of_the_whole_graph(kind: str) -> None:
    pieces: list[int] = []

    def whole(graph: Any, inputs: list[torch.Tensor]) -> Any:
        pieces.append(1)
        return aot_eager(graph, inputs)

    def in_pieces(graph: Any, inputs: Sequence[Any]) -> Any:
        return graph_pieces.compile_pieces(graph, inputs, BLOCK_BYTES // 2, whole)

    def train(backend: Any) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        pieces.clear()
        torch.manual_seed(0)
        model = Network(kind == "checkpoints").to(DEVICE)
        compiled = torch.compile(model, backend=backend, dynamic=kind == "dynamic")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for step in range(2):
            x = torch.randint(100, (2, 16 + (4 * step if kind == "dynamic" else 0))).to(DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=kind == "autocast"):
                loss = compiled(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
        with torch.no_grad():
            results.append(compiled(x))
        return [each.cpu() for each in (*results, *model.state_dict().values())], len(pieces)

    wanted, graphs = train(whole)
    found, number = train(in_pieces)
    assert number >= 2 * graphs
    assert len(found) == len(wanted) > 10
    assert all(map(torch.equal, found, wanted))


class TestTheEntryPoint:
    """What Dynamo calls."""

    @staticmethod
    def graphs_of(function: Any, inputs: list[torch.Tensor], budget: str) -> int:
        """How many graphs Inductor gets for one of Dynamo's."""
        seen: list[Any] = []

        def plain(graph: Any, inputs: list[torch.Tensor], again: bool = True) -> Any:
            if again:
                return entry(graph, inputs, again=False)  # as Inductor does for its options
            seen.append(graph)
            return aot_eager(graph, inputs)

        entry = compiled_graphs._in_pieces(plain)
        torch._dynamo.reset()
        before = torch_uvm.get_budget()
        torch_uvm.set_budget(budget)
        try:
            compiled: Any = torch.compile(function, backend=entry)
            compiled(*inputs)
        finally:
            torch_uvm.set_budget(before)
        return len(seen)

    def test_a_tenth_of_the_budget_decides(self) -> None:
        layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(DEVICE)  # with gradients 4 MiB
        x = [torch.randn(4, 256).to(DEVICE)]
        assert self.graphs_of(layers, x, "none") == 1
        assert self.graphs_of(layers, x, "64MiB") == 1
        assert 3 <= self.graphs_of(layers, x, "10MiB") <= 6

    def test_what_is_not_dynamos_is_whole(self) -> None:
        layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(DEVICE)
        graph = torch.fx.symbolic_trace(layers)
        assert graph_pieces.most_bytes(graph, [torch.randn(4, 256).to(DEVICE)]) is None

    def test_without_pytorchs_splitter_graphs_are_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch_uvm._patches, "graph_pieces")
        monkeypatch.delitem(sys.modules, graph_pieces.__name__)
        monkeypatch.setitem(sys.modules, "torch._dynamo.backends.distributed", None)
        layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(DEVICE)
        with pytest.warns(UserWarning, match="cannot split graphs"):
            assert self.graphs_of(layers, [torch.randn(4, 256).to(DEVICE)], "10MiB") == 1

    def test_views_count_as_their_storage(self) -> None:
        def product(x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):  # each step makes 4 MiB, and uses a row of them
                x = (x * 2)[0].expand(1024, 1024)
            return x

        x = torch.ones(1024, 1024).to(DEVICE)
        assert self.graphs_of(product, [x], "50MiB") >= 4

    def test_a_foreach_optimizer_is_whole(self) -> None:
        def update(*tensors: torch.Tensor) -> None:
            torch._foreach_mul_(tensors, 0.5)
            torch._foreach_add_(tensors, 1.0)

        tensors = [torch.ones(MIB // 4).to(DEVICE) for _ in range(4)]
        assert self.graphs_of(update, tensors, "10MiB") == 1
