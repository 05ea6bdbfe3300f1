"""Budgets, pins and forks while other threads run operators, set budgets, or compile."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from _budget_programs import DEVICE, MIB
from _budget_programs import no_budget_afterwards as no_budget_afterwards
from torch import Tensor, nn

import torch_uvm
from torch_uvm import _C

begun, may_end = threading.Event(), threading.Event()


@torch.library.custom_op("torch_uvm_tests::lasts", mutates_args=())
def lasts(x: Tensor) -> Tensor:
    begun.set()
    may_end.wait(30)
    return x + 1


@contextmanager
def running(x: Tensor) -> Iterator[None]:
    """An operator that uses `x` on another thread."""
    begun.clear()
    may_end.clear()
    thread = threading.Thread(target=lasts, args=(x,))
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        may_end.set()
        thread.join()


@contextmanager
def meanwhile(*works: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Calls each of the functions again and again on a thread of its own. Collects what they raise."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def repeat(work: Callable[[], object]) -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def full(mib: int) -> Tensor:
    return torch.full((mib * MIB // 4,), 1.0, device=DEVICE)


def test_a_lower_budget_takes_what_is_idle_while_an_operator_runs() -> None:
    kept = []
    for budget in (34, 66, 98, 130):  # segments of their own
        torch_uvm.enable(budget=budget * MIB)
        kept += [full(8) for _ in range(4)]
    with running(kept[5]):
        torch_uvm.set_budget(31 * MIB)
        assert torch_uvm.stats()["device_bytes"][DEVICE] <= 32 * MIB  # one segment has the operand
    for _ in range(128):
        kept[0].add_(1)
    assert torch_uvm.stats()["device_bytes"][DEVICE] <= 31 * MIB
    assert all(bool((each == (129 if each is kept[0] else 1)).all()) for each in kept)


@pytest.mark.parametrize(
    "work", [torch_uvm.keep_resident, lambda x: torch_uvm.to(x, "cpu")], ids=["pin", "move"]
)
def test_what_needs_room_waits_for_an_operator_that_has_it(work: Callable[[Tensor], object]) -> None:
    torch_uvm.enable(budget=64 * MIB)
    wanted, other, left = full(30), full(40), full(20)  # `wanted` is on the host
    left.add_(1)
    with running(other):
        threading.Timer(0.2, may_end.set).start()
        made = work(wanted)
        assert may_end.is_set()
    wanted.add_(1)
    assert bool((wanted == 2).all())
    assert not isinstance(made, Tensor) or (made.device.type == "cpu" and bool((made == 2).all()))


def test_a_pin_that_never_fits_is_refused_at_once() -> None:
    torch_uvm.enable(budget=64 * MIB)
    wanted = full(30)
    others = [full(20) for _ in range(2)]
    with torch_uvm.resident(others), running(full(10)):
        began = time.monotonic()
        with pytest.raises(torch.OutOfMemoryError, match="no room to keep"), torch_uvm.resident(wanted):
            pass
        assert time.monotonic() - began < 20  # a pin may wait 30 s


def test_no_allocation_fails_while_the_budget_is_lifted() -> None:
    torch_uvm.enable(budget=16 * MIB)

    def allocate() -> None:
        assert all(bool(each[0] == 1) for each in [full(1) for _ in range(8)])

    with meanwhile(*[allocate] * 4) as errors:
        for _ in range(60):
            torch_uvm.set_budget(None)
            time.sleep(0.01)
            torch_uvm.set_budget(16 * MIB)
            time.sleep(0.01)
    assert not errors


def test_tensors_may_be_swapped_while_a_budget_is_set() -> None:
    torch_uvm.enable(budget=16 * MIB)
    module = nn.Linear(64, 64).to(DEVICE)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with meanwhile(_C.make_all_known) as errors:
            for _ in range(40):
                module.half()
                module.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    assert not errors


def test_a_forked_child_does_not_wait_for_the_parents_threads() -> None:
    torch_uvm.enable(budget=12 * MIB)
    x = full(2)
    calls: list[Callable[[], object]] = [
        gc.collect, torch_uvm.stats, torch_uvm.get_budget, torch_uvm.memory_summary, torch_uvm.disable,
        lambda: torch_uvm.set_budget(8 * MIB), lambda: torch_uvm.set_limit("1GiB"), torch_uvm.step,
        lambda: torch_uvm.keep_resident(x), lambda: torch_uvm.residency(x), lambda: full(1),
        lambda: torch_uvm.to(x, "cpu"), torch_uvm.memory.empty_cache,
    ]  # fmt: skip
    threads: list[Callable[[], object]] = [
        lambda: x.add_(1), lambda: torch_uvm.set_budget(12 * MIB), torch_uvm.stats,
        lambda: torch_uvm.keep_resident(x).release(), lambda: torch_uvm.set_limit("2GiB"),
    ]  # fmt: skip
    with meanwhile(*threads) as errors:
        for _ in range(15):
            if (child := os.fork()) == 0:
                for call in calls:
                    with suppress(Exception):  # it has no managed memory
                        call()
                os._exit(0)
            ends = time.monotonic() + 20
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if time.monotonic() > ends:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    pytest.fail("the child hangs")
                time.sleep(0.005)
    assert not errors


def test_a_deferred_step_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_uvm.enable(budget=8 * MIB, optimizer="deferred")
    parameters = [nn.Parameter(full(1)) for _ in range(12)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.RMSprop(parameters, lr=0.5)
    optimizer.step()

    def is_compiling() -> bool:  # begins after the step has been deferred, when PyTorch asks again
        return sys._getframe(1).f_code.co_name == "maybe_fallback"

    monkeypatch.setattr(torch.compiler, "is_compiling", is_compiling)
    optimizer.step()
    values = [each[0].item() for each in parameters]
    assert values == [values[0]] * 12 and values[0] < -7


@pytest.mark.parametrize("program", ["a budget", "labels"])
def test_storages_that_python_alone_owns_stop_no_thread(program: str) -> None:
    """Another reference to them takes the GIL, whose holder may wait for the engine or for their labels."""
    torch_uvm.enable(budget=12 * MIB)
    tensors = [full(1) for _ in range(20)]
    other = torch_uvm.to(full(1), "cpu").untyped_storage()  # the tensor is gone
    kept: list[torch.UntypedStorage] = []

    def drop() -> None:
        kept.append(full(1).untyped_storage())
        del kept[:-4]

    def drop_label() -> None:
        del kept[:]
        kept.append(torch_uvm.to(tensors[0], "cpu").untyped_storage())

    works = [drop] if program == "a budget" else [drop_label, lambda: torch_uvm.to(tensors[0], "cpu")]
    with meanwhile(*works) as errors:
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            for x in tensors[1:]:
                x.add_(1)
    assert not errors and len(other) == MIB
    assert all(bool((x == x[0]).all()) for x in tensors)
