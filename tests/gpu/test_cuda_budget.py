"""Training on a GPU under a budget gives the results of training without one, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _cuda_budget import OPTIMIZERS, Transformer, check, mlp, tokens, training, vectors
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm._patches import deferred_updates

pytestmark = pytest.mark.usefixtures("to_the_last_bit")


class TestTraining:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_mlp(self, optimizer: str) -> None:
        check(training(mlp, vectors, **OPTIMIZERS[optimizer]))

    def test_mlp_in_a_third(self) -> None:
        check(training(mlp, vectors, steps=8, foreach=True), share=0.35)

    def test_mlp_in_bfloat16(self) -> None:
        check(training(mlp, vectors, dtype=torch.bfloat16, fused=True))

    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_transformer(self, checkpointed: bool) -> None:
        check(training(lambda: Transformer(checkpointed), tokens, fused=True))

    def test_updates_that_are_deferred_once_bytes_move(self) -> None:
        torch_uvm.enable(budget=None, optimizer="auto")
        try:
            check(training(mlp, vectors, steps=12, fused=True))
            assert deferred_updates._defers()
        finally:
            torch_uvm.enable(budget=None, optimizer="in_place")
            torch_uvm.disable()

    def test_repeated_steps_match_the_schedule(self) -> None:
        figures = check(training(mlp, vectors, steps=12, foreach=True)).figures
        assert figures["plan_hits"] > figures["plan_misses"]


class Recurrent(nn.Module):
    """Two layers with dropout between them. cuDNN keeps a random state, and a reserve from the forward."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(512, 768, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(768, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(x)[0])
        return logits


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 20, 512), torch.randint(0, 16, (32, 20))


class TestRecurrent:
    @pytest.mark.parametrize("share", [0.7, 0.45, 0.3])
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_with_dropout(self, kind: Callable[..., nn.RNNBase], share: float) -> None:
        program = training(lambda: Recurrent(kind), sequences, fused=True)
        bounded = check(program, share)
        torch.manual_seed(0)
        native = [result.detach().cpu() for result in program()]
        for number, (result, wanted) in enumerate(zip(bounded.results, native, strict=True)):
            assert torch.equal(result, wanted), number


class TestAutomatic:
    def test_evicts_when_memory_is_short(self, spawn: Spawn) -> None:
        """A limit simulates a small device: the automatic budget is at most that."""
        spawn(
            """
            import torch, torch_uvm
            from torch_uvm import _C
            MIB = 1 << 20
            torch_uvm.set_limit(256 * MIB)
            torch_uvm.enable(budget="auto")
            kept = []
            for number in range(20):
                kept.append(torch.empty(2 * MIB, device="cuda").fill_(number))  # 8 MiB each
            assert torch_uvm.stats()["written_back"]["count"] == 0
            while len(kept) < 60:
                kept.append(torch.empty(2 * MIB, device="cuda").fill_(len(kept)))
            for number, each in enumerate(kept):
                assert (each == number).all().item(), number
            stats = torch_uvm.stats()
            assert stats["written_back"]["bytes"] > 0 and stats["fetched"]["bytes"] > 0
            assert stats["over_budget"] == 0 and _C.peak_managed_bytes() <= 256 * MIB
            """
        )
