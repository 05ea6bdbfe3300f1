"""Each call of the runtime in a training loop fails once, and the loop continues from its last good step."""

# ruff: noqa: B023  (each lambda is called at once)

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _fault_programs import (
    BUDGET,
    nothing_is_left_on,  # noqa: F401  (every test has it)
)
from _faults import LONG, Attempts, each_call_fails
from torch import nn

import torch_uvm

STEPS = 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[part for _ in range(5) for part in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10)
    )


_inputs = [torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(STEPS)]
Make = Callable[[Any], torch.optim.Optimizer]


class Trained:
    def __init__(self, model: nn.Module, make: Make, device: str) -> None:
        self.model = copy.deepcopy(model).to(device)
        self.optimizer = make(self.model.parameters())
        self.device = device

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = self.model(_inputs[number].to(self.device)).square().mean()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state on the CPU."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(
            torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), state)
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def same(one: Any, other: Any) -> bool:
    ours, theirs = (torch.utils._pytree.tree_leaves(state) for state in (one, other))
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(ours, theirs, strict=True)
    )


def _training(make: Make) -> Callable[[Attempts], None]:
    """Training steps. A failed step is repeated from the state before it, as from a checkpoint."""
    model = _model()
    torch_uvm.disable()
    reference = Trained(model, make, "cpu")
    wanted = []
    for number in range(STEPS):
        reference.step(number)
        wanted.append(reference.state())

    def train(attempt: Attempts) -> None:
        ours: Any = None
        while ours is None:  # the second attempt succeeds
            ours = attempt(lambda: Trained(model, make, "emu"))
        state = None
        for number in range(STEPS):
            before = attempt.error
            attempt(lambda: ours.step(number))
            after = attempt(ours.state)
            if attempt.error is not before:
                if state is None:
                    ours = Trained(model, make, "emu")
                else:
                    ours.load(state)
                ours.step(number)
                after = ours.state()
            assert same(after, wanted[number]), f"step {number} after {attempt.error!r}"
            state = after

    return train


OPTIMIZERS: dict[str, Make] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize(
    ("optimizer", "deferred"),
    [(name, deferred) for name in OPTIMIZERS for deferred in (False, True)]
    if LONG
    else [("foreach", False), ("loop", False), ("fused", True)],
)
def test_training(optimizer: str, deferred: bool) -> None:
    train = _training(OPTIMIZERS[optimizer])
    torch_uvm.enable(budget=BUDGET, optimizer="deferred" if deferred else "in_place")
    assert each_call_fails(train, every=499, first=7) > 1
