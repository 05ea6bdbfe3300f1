"""Each call of the runtime under the residency engine fails once. No byte is lost, and pins stay
consistent."""

# ruff: noqa: B023  (each lambda is called at once)

from __future__ import annotations

import itertools

import pytest
import torch
from _fault_programs import (
    BUDGET,
    MIB,
    filled,
    is_all,
    nothing_is_left_on,  # noqa: F401  (every test has it)
)
from _faults import Attempts, check_error, each_call_fails

import torch_uvm
from torch_uvm import _C


class Known:
    """Tensors beyond the budget and their expected values. A failed operator may or may not have written."""

    def __init__(self, attempt: Attempts, count: int) -> None:
        self.attempt = attempt
        made = [attempt(lambda: filled(MIB // 4, float(i))) for i in range(count)]
        self.tensors = [x for x in made if x is not None]
        self.values = [float(i) for i, x in enumerate(made) if x is not None]

    def add(self, index: int) -> None:
        x = self.tensors[index]
        failures = self.attempt.error
        self.attempt(lambda: x.add_(1.0))
        if self.attempt.error is failures:
            self.values[index] += 1.0
        else:
            now = float(x.cpu()[0])  # this call does not fail
            assert now in (self.values[index], self.values[index] + 1.0)
            self.values[index] = now

    def check(self, index: int) -> None:
        x, value = self.tensors[index], self.values[index]
        assert self.attempt(lambda: is_all(x, value), otherwise=True), (index, value)


def _engine(attempt: Attempts) -> None:
    known = Known(attempt, 12)  # of 1 MiB
    count = len(known.tensors)
    for step in range(3):
        for index in range(count):
            known.add(index)
            sums = attempt(lambda: known.tensors[index] + known.tensors[(index + 1) % count])
            wanted = known.values[index] + known.values[(index + 1) % count]
            if sums is not None and index % 4 == step:
                assert attempt(lambda: is_all(sums, wanted), otherwise=True)
            sums = None
    if count > 3:
        kept = attempt(lambda: torch_uvm.keep_resident(known.tensors[0]))
        attempt(known.tensors[1].data_ptr)
        attempt(lambda: known.tensors[2].untyped_storage().data_ptr())
        known.add(1)
        if kept is not None:
            kept.release()
    attempt(lambda: torch_uvm.set_budget(BUDGET // 2))
    for index in range(count):
        known.check(index)
    attempt(lambda: torch_uvm.set_budget(None))
    for index in range(count):
        known.check(index)
    for _ in range(2):  # the second attempt succeeds
        attempt(lambda: torch_uvm.set_budget(BUDGET))


def test_the_engine() -> None:
    torch_uvm.enable(budget=BUDGET)
    assert each_call_fails(_engine, every=71, first=3) > 5


@pytest.mark.parametrize("name", ["copy_async", "record_event", "wait_event"])
def test_each_call_of_the_engines_copies(name: str) -> None:
    torch_uvm.enable(budget=BUDGET)
    assert each_call_fails(_engine, name, every=41, first=5) > 0


def test_a_failed_keep_resident_pins_nothing() -> None:
    torch_uvm.enable(budget=BUDGET)
    xs = [filled(MIB // 2, float(i)) for i in range(3)]  # of 2 MiB
    others = [filled(13 * MIB // 8, 1.0) for _ in range(2)]  # of 6.5 MiB: none of xs fits beside one of them
    on_device = {torch.device("emu:0"): xs[0].nbytes}

    def leave() -> bool:
        """Whether none of `xs` is pinned: all are evicted when others are used."""
        for _ in range(20):
            for other in others:
                other.add_(1.0)
            if all(torch_uvm.residency(x) != on_device for x in xs):
                return True
        return False

    failed = 0
    for nth in itertools.count(1):
        assert leave(), f"after call {nth - 1}"
        _C.emu_fail_call("*", nth)
        try:
            torch_uvm.keep_resident(xs).release()
        except torch.OutOfMemoryError as error:
            if "no room to keep" not in str(error):  # restoring the evicted storages failed too
                check_error(error)
            failed += 1
        except RuntimeError as error:
            check_error(error)
            failed += 1
        if _C.emu_clear_failures() != 0:
            break
    assert failed > 1
    assert all(is_all(x, float(i)) for i, x in enumerate(xs))
    assert torch_uvm.stats()["failures"] > 0
    torch_uvm.memory.reset_residency_stats()
    assert torch_uvm.stats()["failures"] == 0
