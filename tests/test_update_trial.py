"""`optimizer="auto"`: what it tries, what it keeps, and equal bits on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from _deferred import BUDGET, MIB, backward, everything, mlp, on_cpu

import torch_uvm
from torch_uvm import _C
from torch_uvm._patches import deferred_updates
from torch_uvm._patches.update_trial import MEASURED, SETTLING, Trial

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")

ONE = SETTLING + MEASURED + 2  # steps of one kind
BOTH = 2 * ONE


@pytest.fixture
def found(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What trials have logged."""
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


def the_trial() -> Trial:
    assert deferred_updates._trial is not None
    return deferred_updates._trial


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


def test_tries_both_with_equal_bits(found: list[str]) -> None:
    expected, _ = train(BOTH + 8, None)
    results, deferred = train(BOTH + 8, BUDGET, "auto")
    assert all(map(torch.equal, results, expected))
    first = deferred.index(True)
    assert first <= 3  # a step or two pass before bytes move
    in_place = first + ONE - 1
    assert all(deferred[first:in_place]) and not any(deferred[in_place : in_place + SETTLING])
    assert len(found) == 1 and the_trial().decided
    assert deferred[-1] == found[0].startswith("optimizer auto: deferred")


def test_tries_nothing_while_all_fits(found: list[str]) -> None:
    _, deferred = train(BOTH + 8, 256 * MIB, "auto")
    assert not any(deferred)
    assert found == [] and not the_trial().decided


def test_another_budget_is_another_trial(found: list[str]) -> None:
    train(BOTH + 8, BUDGET, "auto")
    before = the_trial()
    torch_uvm.set_budget(BUDGET + MIB)
    assert the_trial() is not before
    assert not the_trial().defers


def test_another_optimizer_is_another_trial(found: list[str]) -> None:
    train(BOTH + 8, BUDGET, "auto")
    _, deferred = train(BOTH + 8, BUDGET, "auto")  # the first optimizer is gone
    assert not deferred[0]
    assert len(found) == 2


def test_one_of_two_optimizers_counts(found: list[str]) -> None:
    """Of two that take turns, as in adversarial training: a step goes from one to the same one's next."""
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    models = [mlp(layers=3), mlp(layers=3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in models]
    deferred = []
    for _ in range(BOTH + 8):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        deferred.append(deferred_updates._defers())
    torch.accelerator.synchronize()
    assert sum(deferred) >= ONE - 1
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


def test_deferred_steps_on_time_are_kept(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`emu` predicts nothing: here, that steps take as long as a second for each operator."""
    monkeypatch.setattr(_C, "predicted_ms_per_operator", lambda: 1e3)
    _, deferred = train(ONE + 4, BUDGET, "auto")
    assert found == [each for each in found if "as predicted" in each] and len(found) == 1
    assert all(deferred[deferred.index(True) :])


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
    deferred = fitting(ONE + 4, lambda step: step == 1)
    assert any(deferred) and not deferred[-1]
    assert found == [] and not the_trial().decided


def test_what_fits_only_deferred_stays_deferred(found: list[str]) -> None:
    """As where temporaries of updates in place need more than the budget, and nothing else moves bytes."""
    deferred = fitting(4 * ONE, lambda step: not deferred_updates._defers())
    returned = deferred.index(False, deferred.index(True))
    again = deferred.index(True, returned)
    assert again - returned <= 3 and all(deferred[again : again + 2 * MEASURED])


def test_an_optimizer_on_the_host_does_not_count(found: list[str]) -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    models = [torch.nn.Linear(512, 512), mlp()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for _ in range(BOTH + 8):
        models[0](torch.randn(4, 512)).sum().backward()
        backward(models[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.accelerator.synchronize()
    assert len(found) == 1


def test_an_exception_in_a_step_leaves_the_trial_as_it_was(found: list[str]) -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="auto")
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fails() -> float:
        raise KeyError("closure")

    for step in range(BOTH + 8):
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
    assert deferred_updates._trial is None
    assert not deferred_updates._defers()
