"""Training and inference under a budget give the results of a run without one, to the last bit.

Each program runs twice on the emulated accelerator, without a budget and with one below its peak. The figures
of the library and of the emulated driver must stay below the budget.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _budget_programs import (
    OPTIMIZERS,
    check,
    cnn,
    gpt,
    images,
    mlp,
    no_budget_afterwards,  # noqa: F401  (every test has it)
    tokens,
    training,
    vectors,
)
from torch import nn

import torch_uvm

KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "mlp": (mlp, vectors),
    "cnn": (cnn, images),
    "gpt": (gpt, tokens),
}


class TestTraining:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_the_run_without_a_budget(self, kind: str, optimizer: str) -> None:
        check(training(*KINDS[kind], **OPTIMIZERS[optimizer]))

    @pytest.mark.parametrize("share", [0.85, 0.4])
    def test_other_shares_of_the_peak(self, share: float) -> None:
        check(training(mlp, vectors, **OPTIMIZERS["adamw loop"]), share)

    def test_checkpointing(self) -> None:
        check(training(lambda: gpt(checkpointed=True), tokens, **OPTIMIZERS["adamw loop"]))

    def test_gradient_accumulation(self) -> None:
        check(training(mlp, vectors, accumulate=3, **OPTIMIZERS["adamw foreach"]))

    def test_evaluation_between_steps(self) -> None:
        check(training(mlp, vectors, evaluate=True, **OPTIMIZERS["adamw loop"]))

    def test_shapes_that_change_each_step(self) -> None:
        sizes = [64, 300, 17, 511, 130, 1, 257]
        check(training(mlp, vectors, steps=9, sizes=sizes, **OPTIMIZERS["adamw foreach"]))

    def test_repeated_steps_match_the_schedule(self) -> None:
        figures = check(training(mlp, vectors, steps=12, **OPTIMIZERS["adamw foreach"]))
        assert figures["plan_hits"] > figures["plan_misses"]


class TestInference:
    def test_equal_layers_are_one_step(self) -> None:
        """Weights beyond the budget are fetched when they are needed, not all of them in each pass."""
        layers, width, passes = 24, 512, 6
        fetched = 0

        def program() -> list[torch.Tensor]:
            nonlocal fetched
            model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to("emu")
            results, before = [], 0
            with torch.no_grad():
                for number in range(2 * passes):
                    if number == passes:
                        before = torch_uvm.stats()["fetched"]["bytes"]
                    results.append(model(torch.ones(8, width, device="emu")).cpu())
            fetched = torch_uvm.stats()["fetched"]["bytes"] - before
            return results

        check(program, 0.5)
        assert 0 < fetched < 0.75 * passes * layers * width * width * 4
