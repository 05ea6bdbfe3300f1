"""Triton kernels under a budget, by Triton's interpreter. They need the package `triton`."""

from __future__ import annotations

import pytest
import torch

import torch_uvm

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

MIB = 1 << 20
N = MIB // 4  # elements of a tensor of 1 MiB
ALL = 12  # tensors, of which eight fit

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")

    @triton.jit
    def add(x, y, z, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(z + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


def test_launches_are_planned_and_their_writes_are_kept() -> None:
    torch_uvm.enable(budget=8 * MIB)
    kept = [torch.full((N,), float(i), device="emu") for i in range(ALL)]
    one = torch.ones(N, device="emu")

    def iterate() -> None:
        for each in kept:
            add[(4,)](one, each, each, N, BLOCK=N // 4)

    for _ in range(6):
        iterate()
    before = torch_uvm.stats()
    iterate()
    after = torch_uvm.stats()
    assert after["plan_hits"] - before["plan_hits"] == ALL
    assert after["plan_misses"] == before["plan_misses"]
    assert after["fetched"]["bytes"] > before["fetched"]["bytes"]
    assert after["over_budget"] == 0
    for i, each in enumerate(kept):
        assert (each == i + 7).all()


def test_named_arguments_and_views() -> None:
    torch_uvm.enable(budget=8 * MIB)
    torch_uvm.memory.reset_residency_stats()
    kept = [torch.full((N,), float(i), device="emu") for i in range(ALL)]
    for _ in range(2):
        for each in kept:
            add[(1,)](z=each[16:], x=each[16:], y=each, n=64, BLOCK=64)
    for i, each in enumerate(kept):
        assert each[:16].tolist() == [i] * 16
        assert each[16].item() == 3 * i  # twice the first element more
    assert torch_uvm.stats()["failures"] == 0


def test_a_launch_that_raises_unpins() -> None:
    torch_uvm.enable(budget=8 * MIB)
    kept = [torch.full((N,), float(i), device="emu") for i in range(ALL)]
    for each in kept:
        with pytest.raises(Exception, match="missing|BLOCK"):
            add[(4,)](each, each, each, N)
    for each in kept:
        each.add_(1)
    assert [each[0].item() for each in kept] == [i + 1 for i in range(ALL)]
    assert torch_uvm.stats()["over_budget"] == 0
