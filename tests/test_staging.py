"""The option staging: copies under a budget go through plain device memory, which counts against the
budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from _models import Gpt
from _spawn import Spawn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
DEVICE = torch.device("emu", 0)
SLOTS = 4


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    gc.collect()
    _C.set_option("staging", "auto")
    _C.request_budget(None, None)
    torch_uvm.memory.empty_cache()


def train(budget: int | None) -> tuple[list[torch.Tensor], int]:
    """Losses and parameters, and the number of transfers across the link."""
    gc.collect()
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.enable(budget=budget)
    torch_uvm.memory.reset_residency_stats()
    failures = torch_uvm.stats()["failures"]  # from earlier tests
    torch.manual_seed(0)
    model = Gpt(True, width=384).to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results = []
    for _ in range(5):
        words = torch.randint(0, 10, (16, 16)).to("emu")
        loss = F.cross_entropy(model(words), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach().cpu())
    results += [each.detach().cpu() for each in model.parameters()]
    figures = torch_uvm.stats()
    assert figures["failures"] == failures and _C.check_residency() is None
    if budget is not None:
        assert figures["over_budget"] or figures["peak_device_bytes"][DEVICE] <= budget
    return results, figures["fetched"]["count"] + figures["written_back"]["count"]


@pytest.mark.parametrize("slot", ["64KiB", "192KiB", "4MiB"])
def test_training_is_equal_to_the_last_bit(slot: str) -> None:
    expected, _ = train(None)
    used = torch_uvm.memory.max_memory_allocated(DEVICE)
    _C.set_option("staging", slot)
    results, copies = train(max(used // 2, 16 * MIB))
    assert copies > 20
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(("slot", "in_all"), [("64KiB", SLOTS * 64 * 1024), ("1GiB", 2 * MIB), ("0", 0)])
def test_slots_count_against_the_budget_and_end_with_it(slot: str, in_all: int) -> None:
    """Slots take at most an eighth of the budget, regardless of their requested size. The first copies make
    them."""
    _C.set_option("staging", slot)
    torch_uvm.enable(budget=16 * MIB)
    kept = [torch.full((MIB,), float(number), device="emu") for number in range(8)]  # 32 MiB
    for _ in range(8):  # until fetches are scheduled ahead
        for each in kept:
            each.add_(1)
    figures = torch_uvm.stats()
    assert figures["device_bytes"][DEVICE] - torch_uvm.memory.memory_reserved(DEVICE) == in_all
    assert figures["device_bytes"][DEVICE] <= 16 * MIB
    torch_uvm.set_budget(None)
    assert torch_uvm.stats()["device_bytes"][DEVICE] == torch_uvm.memory.memory_reserved(DEVICE)
    for number, each in enumerate(kept):
        assert (each == number + 8).all().item()


@pytest.mark.parametrize("seed", [2, 11, 29])
def test_under_delayed_schedules(seed: int, spawn: Spawn) -> None:
    spawn(
        """
        import torch, torch_uvm
        from torch_uvm import _C

        torch_uvm.enable(budget="24MiB")
        kept = [torch.full((1 << 20,), float(i), device="emu") for i in range(12)]  # 48 MiB
        sums = [torch.full((1 << 20,), float(i)) for i in range(12)]
        for step in range(6):
            for i in range(12):
                kept[i].add_(kept[(i + 5) % 12])
                sums[i].add_(sums[(i + 5) % 12])
        for i in range(12):
            assert torch.equal(kept[i].cpu(), sums[i]), i
        figures = torch_uvm.stats()
        assert figures["written_back"]["count"] > 20 and figures["failures"] == 0
        assert figures["device_bytes"][torch.device("emu", 0)] > torch_uvm.memory.memory_reserved("emu:0")
        assert _C.check_residency() is None
        """,
        env={
            "TORCH_UVM_DEVICE": "emu",
            "TORCH_UVM_CONF": f"staging:128KiB,emulated_schedule_seed:{seed}",
        },
    )
