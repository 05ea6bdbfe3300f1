"""Allocations, copies, moves and hints while each runtime call fails once: each raises as documented or
succeeds."""

# ruff: noqa: B023  (each lambda is called at once)

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _fault_programs import (
    filled,
    is_all,
    names,
    nothing_is_left_on,  # noqa: F401  (every test has it)
)
from _faults import LONG, Attempts, each_call_fails, emu
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C


def _allocations(attempt: Attempts) -> None:
    one, two = emu.current_stream(), attempt(emu.Stream)
    kept: list[tuple[torch.Tensor, float]] = []
    for number, count in enumerate((10, 1000, 300_000, 3_000_000, 700_000)):
        made = attempt(lambda: filled(count, float(number)))
        if made is None:
            continue
        kept.append((made, float(number)))
        if two is not None:
            attempt(lambda: made.record_stream(two))
            with emu.stream(two):
                copied = attempt(lambda: made.clone())
                if copied is not None:
                    attempt(lambda: copied.record_stream(one))
                del copied
        if number == 2:
            del kept[0]
            attempt(torch_uvm.memory.empty_cache)
    attempt(torch.accelerator.synchronize)
    for made, value in kept:
        right = attempt(lambda: is_all(made, value), otherwise=True)
        assert right
    host = attempt(lambda: torch_uvm.memory.full((100_000,), 3.0, device="cpu"))
    assert host is None or (host == 3.0).all()


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "plain"])
def test_allocation(managed: bool) -> None:
    if managed:
        torch_uvm.enable(budget=None)
    assert each_call_fails(_allocations, every=2) >= 10


def test_pinned_memory_is_refused_as_memory() -> None:
    def pin(attempt: Attempts) -> None:
        x = torch.arange(1000.0)
        pinned = attempt(x.pin_memory)
        assert pinned is None or torch.equal(pinned, x)

    assert each_call_fails(pin, "allocate_pinned") == 1


def _moves(attempt: Attempts) -> None:
    x = torch.arange(300_000.0)
    ours = attempt(lambda: torch_uvm.to(x, "emu", managed=True))
    if ours is None:
        return
    other = emu.Stream() if attempt.error is None else None
    address = ours.data_ptr()
    for round_, non_blocking in enumerate((False, True)):
        moved = attempt(lambda: torch_uvm.to(ours, "cpu", non_blocking=non_blocking))
        attempt(emu.synchronize)
        for label in (ours, moved):
            if label is not None:
                assert label.data_ptr() == address
                assert attempt(lambda: torch.equal(label.cpu(), x + round_), otherwise=True)
        if moved is not None:
            back = attempt(lambda: torch_uvm.to(moved, "emu", non_blocking=non_blocking))
            assert back is None or back.data_ptr() == address
        if other is not None:
            attempt(lambda: ours.record_stream(other))
        earlier = attempt.error
        attempt(lambda: ours.add_(1.0))
        found = attempt(ours.cpu)
        if attempt.error is earlier:
            assert torch.equal(found, x + round_ + 1)
        elif found is not None:  # either value is possible after a failure
            assert torch.equal(found, x + round_ + 1) or torch.equal(found, x + round_)
            return


def _copies(attempt: Attempts) -> None:
    x = torch.arange(100_000.0)
    pinned = attempt(x.pin_memory)
    sources = [x] if pinned is None else [x, pinned]
    for source, non_blocking in itertools.product(sources, (False, True)):
        there = attempt(lambda: source.to("emu", non_blocking=non_blocking))
        if there is None:
            continue
        assert attempt(lambda: there[1].item() == 1.0, otherwise=True)
        back = attempt(lambda: there.to("cpu", non_blocking=non_blocking))
        attempt(emu.synchronize)
        assert back is None or torch.equal(back, x)
        into = torch.empty(0) if pinned is None else pinned.clone()
        if pinned is not None:
            done = attempt(lambda: into.copy_(there, non_blocking=True))
            attempt(emu.synchronize)
            assert done is None or torch.equal(into, x)
        halves = attempt(lambda: there.half().float())  # converted during the copy
        assert halves is None or attempt(lambda: torch.equal(halves.cpu(), x.half().float()), otherwise=True)
        strided = attempt(lambda: there.view(1000, 100).t().cpu())
        assert strided is None or torch.equal(strided, x.view(1000, 100).t())


def test_moves() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_moves) > 10


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "plain"])
def test_copies(managed: bool) -> None:
    if managed:
        torch_uvm.enable(budget=None)
    assert each_call_fails(_copies) > 20


def _hints(attempt: Attempts) -> None:
    x = attempt(lambda: filled(1 << 20, 3.0))
    if x is None:
        return
    attempt(lambda: torch_uvm.prefetch(x, "cpu"))
    attempt(lambda: torch_uvm.prefetch([x, {"again": x[100_000:]}]))
    attempt(lambda: torch_uvm.advise(x, read_mostly=True, preferred_location="emu", accessed_by=["cpu"]))
    assert attempt(lambda: is_all(x, 3.0), otherwise=True)
    attempt(lambda: torch_uvm.advise(x, read_mostly=False, preferred_location=None, accessed_by=[]))
    scratch = attempt(lambda: filled(1 << 20, 4.0))
    if scratch is not None:
        attempt(lambda: torch_uvm.discard(scratch))
        on_host = attempt(lambda: torch_uvm.to(scratch, "cpu"))
        if on_host is not None:
            attempt(lambda: torch_uvm.discard(on_host))  # waits for the stream
    assert attempt(lambda: is_all(x, 3.0), otherwise=True)


def test_hints() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_hints) > 10


@pytest.mark.parametrize("name", ["record_event", "synchronize_event"])
def test_a_discard_that_fails_leaves_no_event(name: str) -> None:
    torch_uvm.enable(budget=None)
    on_host = torch_uvm.to(filled(1 << 20, 4.0), "cpu")  # its discard waits for the stream
    before = _C.emu_live_objects()
    _C.emu_fail_call(name, 1)
    with pytest.raises(RuntimeError, match=name):
        torch_uvm.discard(on_host)
    assert _C.emu_live_objects() == before
    torch_uvm.discard(on_host)


def _in_scope(scope: Any) -> Callable[[Attempts], None]:
    layer = nn.Linear(64, 64)
    wanted = layer(torch.ones(8, 64)).sum().item()

    def iterate(attempt: Attempts) -> None:
        for _ in range(3):
            entered = attempt(lambda: scope.__enter__() or True)
            if entered is None:
                continue
            try:
                ours = attempt(lambda: copy.deepcopy(layer).to("emu"))
                if ours is not None:
                    found = attempt(lambda: ours(torch.ones(8, 64, device="emu")).sum().item())
                    assert found is None or found == pytest.approx(wanted, rel=1e-5)
                large = attempt(lambda: filled(1 << 20, 5.0))
                assert large is None or attempt(lambda: is_all(large, 5.0), otherwise=True)
                ours = large = None
            finally:
                attempt(lambda: scope.__exit__(None, None, None))
        attempt(scope.release if hasattr(scope, "release") else (lambda: None))

    return iterate


def test_an_arena() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_in_scope(torch_uvm.allocators.arena("1MiB")), every=2) > 5


def test_a_plan() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_in_scope(torch_uvm.allocators.allocation_plan(next(names))), every=3) > 5


def _host_tensors(attempt: Attempts) -> None:
    x = attempt(lambda: torch.full((1 << 20,), 3.0))
    if x is None:
        return
    there = attempt(lambda: torch_uvm.to(x, "emu"))
    for label in (x, there):
        assert label is None or attempt(lambda: is_all(label, 3.0), otherwise=True)


@pytest.mark.filterwarnings("ignore:torch_uvm. a CPU tensor gets ordinary memory")
def test_host_tensors() -> None:
    torch_uvm.enable(budget=None, host_tensors=True)
    assert each_call_fails(_host_tensors) > 3


TWO = """
    import torch, torch_uvm
    from _faults import Attempts, each_call_fails, emu

    def between(attempt):
        x = attempt(lambda: torch.arange(300_000.0).to("emu:0"))
        if x is None:
            return
        there = attempt(lambda: x.to("emu:1"))
        if there is not None:
            assert attempt(lambda: torch.equal(there.cpu(), torch.arange(300_000.0)), otherwise=True)
            earlier = attempt.error
            attempt(lambda: there.copy_(x.add(1.0)))
            found = attempt(there.cpu)
            attempt(lambda: torch.accelerator.synchronize(1))
            done, before = torch.arange(300_000.0) + 1, torch.arange(300_000.0)
            if attempt.error is earlier:
                assert torch.equal(found, done)
            else:
                assert found is None or torch.equal(found, done) or torch.equal(found, before)
        moved = attempt(lambda: torch_uvm.to(x, "emu:1"))
        if moved is not None:
            assert moved.data_ptr() == x.data_ptr()
            assert attempt(lambda: torch.equal(moved.cpu(), torch.arange(300_000.0)), otherwise=True)

    torch_uvm.enable(budget=None)
    assert each_call_fails(between) > 10
"""


@pytest.mark.parametrize("seed", range(8) if LONG else [3])
def test_between_two_devices(spawn: Spawn, seed: int) -> None:
    """Under delayed work, a missing wait shows as missing bytes."""
    env = {
        "TORCH_UVM_CONF": f"emulated_devices:2,emulated_schedule_seed:{seed}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    spawn(TWO, env=env)
