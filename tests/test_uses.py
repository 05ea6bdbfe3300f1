"""`torch_uvm.uses`: code that is no operator, with the tensors that it declares."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from _threads import in_threads

import torch_uvm

MIB = 1 << 20
BUDGET = 8 * MIB
N = MIB // 4  # elements of a tensor of 1 MiB
ALL = 12  # tensors, of which eight fit


@pytest.fixture(autouse=True)
def small_budget() -> Iterator[None]:
    torch_uvm.enable(budget=BUDGET)
    torch_uvm.memory.reset_residency_stats()
    yield


def tensors() -> list[torch.Tensor]:
    return [torch.full((N,), float(i), device="emu") for i in range(ALL)]


def floats(x: torch.Tensor) -> ctypes.Array[ctypes.c_float]:
    """What an extension sees at the tensor's address. Fetches are in the order of the stream."""
    torch.accelerator.synchronize()
    return (ctypes.c_float * x.numel()).from_address(x.data_ptr())


def moved(kind: str) -> int:
    return int(torch_uvm.stats()[kind]["bytes"])


def test_writes_and_reads_at_addresses_survive_evictions() -> None:
    kept = tensors()
    for step in range(6):
        for i in range(ALL):
            source, target = kept[i], kept[(i + 1) % ALL]
            with torch_uvm.uses(source, target, writes=(target,)):
                floats(target)[step] = floats(source)[N - 1] + step
    for i, each in enumerate(kept):
        assert each[:6].tolist() == [(i - 1) % ALL + step for step in range(6)]
        assert each[N - 1].item() == i
    assert moved("fetched") > 0
    assert torch_uvm.stats()["over_budget"] == 0


def test_addresses_hold_until_the_scope_ends() -> None:
    kept = tensors()
    with torch_uvm.uses(kept[0]):
        address = kept[0].data_ptr()
        for each in kept[1:]:
            each.add_(1)  # evicts others
        assert kept[0].data_ptr() == address
    for each in kept[1:]:
        each.add_(1)
    assert kept[0][0].item() == 0


def test_a_scope_may_end_on_another_thread_and_in_any_order() -> None:
    kept = tensors()

    def scope(x: torch.Tensor) -> Iterator[int]:
        with torch_uvm.uses(x):
            yield x.data_ptr()

    first, second = scope(kept[0]), scope(kept[1])
    next(first)
    address = next(second)
    thread = threading.Thread(target=first.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    for _ in range(3):
        for each in kept[2:]:
            each.add_(1)
    torch.accelerator.synchronize()
    ctypes.c_float.from_address(address).value = 77
    second.close()  # type: ignore[attr-defined]
    for each in kept:
        each.add_(1)
    assert [each[0].item() for each in kept] == [1, 78, *[i + 4 for i in range(2, ALL)]]


def test_addresses_of_other_tensors_are_given_out_as_ever() -> None:
    kept, used = tensors(), torch.ones(N, device="emu")
    for step in range(6):
        for each in kept:
            with torch_uvm.uses(used):
                floats(each)[5] += 1
            if step % 2:
                each.add_(0)
    assert [each[5].item() for each in kept] == [i + 6 for i in range(ALL)]


def test_updates_within_a_scope() -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="deferred")
    weight = torch.nn.Parameter(torch.ones(N, device="emu"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.sum().backward()
    with torch_uvm.uses(weight):
        optimizer.step()
        found = floats(weight)
        assert found[0] == 0.5
        found[0] = 10
    assert weight[0].item() == 10


def test_it_is_planned_like_an_operator() -> None:
    kept = tensors()

    def iterate() -> None:
        for each in kept:
            with torch_uvm.uses(each):
                floats(each)[0] += 1

    for _ in range(6):
        iterate()
    before = torch_uvm.stats()
    iterate()
    after = torch_uvm.stats()
    assert after["plan_hits"] - before["plan_hits"] == ALL
    assert after["plan_misses"] == before["plan_misses"]
    assert [each[0].item() for each in kept] == [i + 7 for i in range(ALL)]


def test_an_exception_ends_the_scope() -> None:
    kept = tensors()
    for each in kept:
        with pytest.raises(ArithmeticError), torch_uvm.uses(each):
            raise ArithmeticError
    for each in kept:
        each.add_(1)
    assert [each[0].item() for each in kept] == [i + 1 for i in range(ALL)]
    assert torch_uvm.stats()["over_budget"] == 0


def test_two_threads() -> None:
    kept = tensors()

    def work(mine: list[torch.Tensor]) -> None:
        for _ in range(30):
            for each in mine:
                with torch_uvm.uses(each):
                    floats(each)[0] += 1

    in_threads(*(partial(work, kept[part::2]) for part in (0, 1)))
    assert [each[0].item() for each in kept] == [i + 30 for i in range(ALL)]


@pytest.mark.parametrize("scope", [torch_uvm.uses, torch_uvm.resident])
def test_what_runs_later_is_not_decorated(scope: Callable[..., Any]) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match="open the scope inside generators"):
            scope(torch.ones(4, device="emu"))(function)


def test_as_a_decorator_and_with_other_tensors() -> None:
    managed, other = tensors()[0], torch.zeros(4)

    @torch_uvm.uses(managed, other)
    def call() -> float:
        return floats(managed)[3]

    assert call() == call() == 0


def test_a_pending_update_runs_before() -> None:
    torch_uvm.enable(budget=BUDGET, optimizer="deferred")
    weight = torch.nn.Parameter(torch.ones(N, device="emu"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()
    with torch_uvm.uses(weight, writes=()):
        assert floats(weight)[0] == 0.5


def test_only_tensors() -> None:
    with pytest.raises(TypeError, match="takes writes"):
        torch_uvm.uses(writes=3)  # type: ignore[arg-type]
    torch_uvm.uses(writes=torch.ones(2))  # one, and not its elements
    with pytest.raises(TypeError, match="takes tensors"):
        torch_uvm.uses([torch.ones(2)])  # type: ignore[arg-type]
