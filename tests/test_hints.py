"""Discard and residency, and training with hints: no hint changes a result."""

# torch has no stubs for torch.emu; wrong arguments are the point of some tests.
# mypy: disable-error-code="arg-type, attr-defined"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _emulated_hints import (
    calls,
    fresh_counters,  # noqa: F401  (every test has it)
    on_host,
)
from _hint_pages import MIB, PAGE, neighbours
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C, advise, discard, emulated, prefetch, residency

EMU = torch.device("emu:0")
CPU = torch.device("cpu")


class TestDiscard:
    def test_migration_of_discarded_pages_copies_nothing(self) -> None:
        x = torch_uvm.memory.ones(4 * MIB, dtype=torch.uint8)
        discard(x)
        assert calls("discard") == 1
        prefetch(x, "cpu")
        assert emulated.counters()["bytes_to_host"] == 0
        x.fill_(3)
        assert bool((x == 3).all())

    def test_never_covers_a_gap(self) -> None:
        x = torch_uvm.memory.ones(16, PAGE, dtype=torch.uint8)
        discard(x[:, : PAGE - 512])
        assert calls("discard") == 0
        discard(x[::2])
        assert calls("discard") == 8
        prefetch(x, "cpu")
        assert emulated.counters()["bytes_to_host"] == 8 * PAGE

    def test_keeps_the_bytes_of_neighbours(self) -> None:
        left, x, right = neighbours(3, 160 * 1024)
        discard(x)
        prefetch([left, x, right], "cpu")
        own = sum(count for _, count in _C.page_ranges([x], PAGE))
        given = sum(count for _, count in _C.page_ranges([left, x, right], PAGE))
        assert emulated.counters()["bytes_to_host"] == given - own > 0 < own
        assert bool((left == 1).all()) and bool((right == 1).all())

    def test_is_a_write_to_autograd(self) -> None:
        x = torch_uvm.memory.ones(MIB)
        y = torch_uvm.to(x, "cpu")
        discard(x)
        assert x._version == y._version == 2  # ones() counts as a write
        weight = torch_uvm.memory.ones(MIB).requires_grad_()
        loss = (x * weight).sum()
        discard(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_of_a_leaf_that_requires_grad(self) -> None:
        weight = nn.Parameter(torch_uvm.memory.ones(MIB))
        spare = torch_uvm.memory.ones(MIB)
        for x in (weight, weight[:10], [spare, weight]):
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                discard(x)
        assert calls("discard") == 0
        assert spare._version == 1
        with torch.no_grad():
            discard(weight)
        assert calls("discard") == 1

    def test_of_inference_tensors(self) -> None:
        with torch.inference_mode():
            x = torch_uvm.memory.ones(MIB)
            discard(x)
        with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
            discard(x)
        assert calls("discard") == 1


class TestResidency:
    def test_of_unmanaged_tensors(self) -> None:
        x = torch.zeros(4, 6)
        assert residency(x) == residency([x, x.t(), x[1]]) == {CPU: 96}
        assert residency(x[:, ::2]) == {CPU: 48}
        assert residency(x[:1].expand(5, 6)) == {CPU: 24}
        assert residency(torch.zeros(3, device="emu")) == {EMU: 12}
        assert residency(torch.zeros(0)) == residency([]) == residency(torch_uvm.memory.empty(0)) == {}

    def test_of_views_counts_their_elements(self) -> None:
        x = on_host(16 * PAGE).view(16, PAGE)
        prefetch(x[4:8], EMU)
        assert residency(x) == {CPU: 12 * PAGE, EMU: 4 * PAGE}
        assert residency(x[:, :3]) == {CPU: 36, EMU: 12}
        assert residency([x[4:6], x[5:7], torch_uvm.to(x[6:8], "cpu")]) == {EMU: 4 * PAGE}

    def test_with_too_many_runs_counts_small_gaps(self) -> None:
        x = on_host(4 * MIB)
        prefetch(x[:MIB], EMU)
        assert residency(x[::2]) == {CPU: 3 * MIB - 1, EMU: MIB}  # up to the last element
        assert residency([x[::2], x[1::2]]) == {CPU: 3 * MIB, EMU: MIB}

    def test_after_moves(self) -> None:
        x = on_host(4 * MIB)
        y = torch_uvm.to(x, EMU)
        assert residency(x) == residency(y) == emulated.residency(y) == {EMU: 4 * MIB}

    def test_ignores_prefetches_of_an_earlier_tensor(self) -> None:
        x = on_host(4 * MIB)
        prefetch(x[: 3 * MIB], EMU)
        address = x.data_ptr()
        del x
        y = torch_uvm.memory.ones(4 * MIB, dtype=torch.uint8, device="cpu")
        assert y.data_ptr() == address
        assert residency(y) == {CPU: 4 * MIB}


def test_results_never_change() -> None:
    """A training run with hints in many places gives the same results, to the last bit."""

    def train(hint: Callable[[Any, str], None]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        with torch_uvm.enabled():
            model.to("emu")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            inputs = torch.randn(64, 256).to("emu")
            for step in range(6):
                hint([model, optimizer, {"inputs": inputs}], "cpu" if step % 2 else "emu")
                loss = model(inputs).square().mean()
                hint(optimizer, "cpu")
                loss.backward()
                hint([p.grad for p in model.parameters()], "emu")
                optimizer.step()
                hint(model, "cpu")
                optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    def both(x: Any, device: str) -> None:
        advise(x, read_mostly=device == "cpu", preferred_location=device, accessed_by=["cpu", "emu"])
        prefetch(x, device)

    plain, hinted = train(lambda x, device: None), train(both)
    assert calls("prefetch") > 10 and calls("advise") > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, hinted, strict=True))


def test_hints_do_nothing_on_memory_without_support(spawn: Spawn) -> None:
    done = spawn("""
        import torch, torch_uvm
        from torch_uvm import _C, emulated
        from torch_uvm import advise, discard, prefetch, residency
        x = torch_uvm.memory.ones(1 << 20, device="cpu")
        _C.pretend_not_concurrent(True)
        emulated.reset_counters()
        for _ in range(3):
            prefetch(x, "emu"); prefetch(x, "cpu"); advise(x, True, "emu", "cpu"); discard(x)
        counters = emulated.counters()
        assert not any(counters[f"{name}_calls"] for name in ("prefetch", "advise", "discard")), counters
        assert residency(x) == {torch.device("cpu"): 1 << 22}
        assert x._version == 4 and bool((x == 1).all())
    """)
    assert done.stderr.count("hints about managed memory do nothing here") == 1
