"""Each thread that trains or evaluates has a loop of its own, with a schedule and a share of the budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch
from _budget_programs import DEVICE, MIB, mlp, vectors
from _budget_programs import no_budget_afterwards as no_budget_afterwards
from torch import Tensor, nn

import torch_uvm

PLANNED = 0.95  #: of the operators
BUDGET = 16 * MIB


class Training:
    """A model of about 20 MiB with its optimizer's state, and steps on batches of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = mlp().to(DEVICE)
        self.batch = vectors().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.batch)

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def together(*works: Callable[[], None]) -> None:
    threads = [Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        while Path(f"/proc/self/task/{thread.native_id}").exists():
            time.sleep(0.001)  # Python no longer waits for it, but it has not ended


def planned(work: Callable[[], None]) -> float:
    """The share of the operators that were planned while `work` ran."""
    before = torch_uvm.stats()
    work()
    after = torch_uvm.stats()
    hits, misses = (after[key] - before[key] for key in ("plan_hits", "plan_misses"))
    assert after["failures"] == before["failures"]
    one = torch.ones(1).to(DEVICE)
    for _ in range(128):  # operators that exceeded the budget together are followed by a return to it
        one + 1
    assert torch_uvm.stats()["device_bytes"][DEVICE] <= torch_uvm.get_budget(DEVICE)
    return float(hits / (hits + misses))


@pytest.mark.parametrize("optimizer", ["in_place", "deferred"])
def test_two_threads_that_train_a_model_each_are_planned_and_compute_the_same(optimizer: str) -> None:
    torch_uvm.enable(budget=2 * BUDGET, optimizer=optimizer)
    expected = []
    for seed in range(2):
        alone = Training(seed)
        alone.run(40)
        expected.append(alone.parameters())
    del alone
    trainings = [Training(seed) for seed in range(2)]  # made by this thread, run by others
    together(*(lambda each=each: each.run(20) for each in trainings))
    # Where operators of both do not fit together, `over_budget` rises.
    assert planned(lambda: together(*(lambda each=each: each.run(20) for each in trainings))) > PLANNED
    for training, parameters in zip(trainings, expected, strict=True):
        assert all(map(torch.equal, training.parameters(), parameters))


def test_what_another_thread_has_trained_may_be_evaluated_in_turn() -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="in_place")
    training = Training(0)

    def rounds() -> None:
        for _ in range(4):
            together(lambda: training.run(6))
            training.evaluate()

    rounds()
    assert planned(rounds) > PLANNED


def test_a_new_thread_continues_the_loop_of_one_that_has_ended() -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="in_place")
    made: list[Training] = []
    together(lambda: made.append(Training(0)))
    for _ in range(3):
        together(lambda: made[0].run(6))
    assert planned(lambda: together(lambda: made[0].run(20))) > PLANNED


def test_threads_of_a_pool_that_use_one_model_share_a_loop() -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="in_place")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).to(DEVICE)
    batch = torch.randn(256, 1024).to(DEVICE)

    @torch.no_grad()
    def infer(_: int) -> Tensor:
        result: Tensor = model(batch)
        return result.cpu()

    expected = infer(0)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            assert all(torch.equal(expected, result) for result in pool.map(infer, range(60)))

    def by_one_thread() -> None:
        for number in range(40):
            infer(number)

    by_one_thread()
    assert planned(by_one_thread) > PLANNED


def test_a_new_thread_may_run_the_loop_that_others_have_left_to_share_one() -> None:
    torch_uvm.enable(budget=7 * BUDGET, optimizer="in_place")
    shared = Training(0)
    for _ in range(2):
        together(lambda: shared.run(4))
        shared.run(4)
    new = Training(1)
    together(lambda: new.run(10))
    before = torch_uvm.stats()["fetched"]["bytes"]
    together(lambda: new.run(10))
    assert torch_uvm.stats()["fetched"]["bytes"] == before, "it fits"


def test_a_loop_gets_the_whole_budget_when_the_other_has_ended() -> None:
    torch_uvm.enable(budget=7 * BUDGET, optimizer="in_place")
    first, second = Training(0), Training(1)
    together(lambda: first.run(30), lambda: second.run(30))
    first.run(200)  # shares stand for thousands of operators
    before = torch_uvm.stats()["fetched"]["bytes"]
    first.run(20)
    assert torch_uvm.stats()["fetched"]["bytes"] == before, "it fits"


def test_loops_that_ended_before_the_budget_was_set_have_no_share_in_it() -> None:
    torch_uvm.enable(budget=7 * BUDGET, optimizer="in_place")
    earlier = [Training(seed) for seed in range(3)]
    together(*(lambda each=each: each.run(3) for each in earlier))
    one = torch.ones(1).to(DEVICE)
    for _ in range(3400):  # shares stand for 4096 operators
        one + 1
    del earlier
    torch_uvm.set_budget(None)
    torch_uvm.enable(budget=5 * BUDGET, optimizer="in_place")
    before = torch_uvm.stats()["fetched"]["bytes"]
    now = Training(0)
    together(lambda: now.run(40))
    assert torch_uvm.stats()["fetched"]["bytes"] == before, "it fits"
