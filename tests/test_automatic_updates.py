"""`optimizer="auto"`: when it defers, when it returns, and equal bits on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from _deferred import BUDGET, MIB, backward, everything, mlp, on_cpu

import torch_uvm
from torch_uvm import _C
from torch_uvm._patches import deferred_updates
from torch_uvm._patches.automatic_updates import STILL, Automatic

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")

MANY = 24  # steps


@pytest.fixture
def found(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was logged."""
    said: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("optimizer auto"):
                said.append(record.getMessage())

    caplog.set_level(logging.INFO, "torch_uvm")
    handler = Lines()
    logging.getLogger("torch_uvm").addHandler(handler)
    yield said
    logging.getLogger("torch_uvm").removeHandler(handler)


def automatic() -> Automatic:
    assert deferred_updates._automatic is not None
    return deferred_updates._automatic


def train(
    steps: int, budget: int | None, optimizer: str = "in_place"
) -> tuple[list[torch.Tensor], list[bool]]:
    """Losses, parameters and state at the end, and whether each step was deferred."""
    torch_uvm.enable(budget=budget, optimizer=optimizer)
    torch.manual_seed(0)
    model = mlp()
    updates = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, deferred = [], []
    for _ in range(steps):
        losses.append(backward(model))
        updates.step()
        deferred.append(deferred_updates._defers())
        updates.zero_grad()
    torch.accelerator.synchronize()
    return on_cpu([*losses, *everything(model, updates)]), deferred


def test_defers_with_equal_bits_once_memory_is_short(found: list[str]) -> None:
    expected, _ = train(MANY, None)
    results, deferred = train(MANY, BUDGET, "auto")
    assert all(map(torch.equal, results, expected))
    first = deferred.index(True)
    assert first <= 3 and all(deferred[first:])  # a step or two pass before bytes move
    assert len(found) == 1


def test_defers_nothing_while_all_fits(found: list[str]) -> None:
    _, deferred = train(MANY, 256 * MIB, "auto")
    assert not any(deferred)
    assert found == []


def test_another_budget_begins_anew(found: list[str]) -> None:
    train(MANY, BUDGET, "auto")
    before = automatic()
    torch_uvm.set_budget(BUDGET + MIB)
    assert automatic() is not before
    assert not automatic().defers


def test_optimizers_in_turn(found: list[str]) -> None:
    """As in adversarial training."""
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    models = [mlp(layers=3), mlp(layers=3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in models]
    deferred = []
    for _ in range(MANY):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        deferred.append(deferred_updates._defers())
    torch.accelerator.synchronize()
    assert all(deferred[4:])
    assert len(found) == 1


def test_steps_within_a_backward_stay_in_place(found: list[str]) -> None:
    """They free each gradient at once. Deferred, all gradients would live until the next step."""
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    torch.manual_seed(0)
    model = mlp()
    optimizers = {each: torch.optim.AdamW([each], lr=1e-3) for each in model.parameters()}
    deferred: list[bool] = []

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]
        deferred.append(deferred_updates._defers())

    hooks = [each.register_post_accumulate_grad_hook(update) for each in optimizers]
    for _ in range(4):
        backward(model)
    for hook in hooks:
        hook.remove()  # they hold the parameters, which hold them
    torch.accelerator.synchronize()
    assert len(deferred) == 4 * len(optimizers) and not any(deferred)
    assert torch_uvm.stats()["fetched"]["bytes"] > 0  # it could have been deferred


def fitting(steps: int, is_short: Callable[[int], bool]) -> list[bool]:
    """Whether each step was deferred, of a model that leaves for something large where memory is short."""
    torch_uvm.enable(budget=64 * MIB, optimizer="auto")
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    deferred = []
    for step in range(steps):
        backward(model)
        if is_short(step):
            for _ in range(2):
                torch.ones(60 * MIB // 4, device="emu").add_(1)
        optimizer.step()
        optimizer.zero_grad()
        deferred.append(deferred_updates._defers())
    torch.accelerator.synchronize()
    return deferred


def test_what_fits_after_all_returns_in_place(found: list[str]) -> None:
    deferred = fitting(STILL + 6, lambda step: step == 1)
    assert any(deferred) and not deferred[-1]
    assert len(found) == 2


def test_what_fits_only_deferred_stays_deferred(found: list[str]) -> None:
    """As where temporaries of updates in place need more than the budget, and nothing else moves bytes."""
    deferred = fitting(5 * STILL, lambda step: not deferred_updates._defers())
    returned = deferred.index(False, deferred.index(True))
    again = deferred.index(True, returned)
    assert again - returned <= 3 and all(deferred[again : again + 2 * STILL])


def test_an_optimizer_on_the_host_does_not_count(found: list[str]) -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    models = [torch.nn.Linear(512, 512), mlp()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for _ in range(MANY):
        models[0](torch.randn(4, 512)).sum().backward()
        backward(models[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.accelerator.synchronize()
    assert len(found) == 1


def test_an_exception_in_a_step_changes_nothing(found: list[str]) -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fails() -> float:
        raise KeyError("closure")

    for step in range(MANY):
        backward(model)
        if step % 5 == 0:
            with pytest.raises(KeyError):
                optimizer.step(fails)
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    assert len(found) == 1
    assert _C.check_residency() is None


def test_the_option_and_its_ends() -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    assert deferred_updates.chosen() == "auto"
    torch_uvm.enable(optimizer="in_place")
    assert deferred_updates._automatic is None
    assert not deferred_updates._defers()
