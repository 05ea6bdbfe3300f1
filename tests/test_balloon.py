"""The automatic budget on a device made small by plain memory, and below a limit of managed memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _spawn import Spawn

TESTS = Path(__file__).parent
EMULATED = {"TORCH_UVM_DEVICE": "emu"}


def test_training_beside_a_balloon(spawn: Spawn) -> None:
    """Runs the program's loops. It exits with 1 if a promise is broken."""
    spawn(args=[str(TESTS / "_balloon.py"), "out.json"], env=EMULATED)
    found = json.loads((spawn.folder / "out.json").read_text())
    assert all(found["promises"].values())
    assert found["budget"] <= found["limit"] <= found["free_beside_the_balloon"] // 2


@pytest.mark.parametrize("limit", ["256MiB", "64MiB"])
def test_the_automatic_budget_is_at_most_the_limit(spawn: Spawn, limit: str) -> None:
    """A limit below what the device has free. The engine evicts before the limit refuses."""
    spawn(
        f"""
        import torch, torch_uvm
        torch_uvm.emulated.configure(memory="1GiB")
        torch_uvm.enable(budget="auto", limit={limit!r})
        limit = torch_uvm._C.parse_bytes({limit!r})
        assert torch_uvm.get_budget() == limit
        size = limit // 32
        def make(number):
            return torch.full((size // 4,), float(number), device="emu")
        kept = [make(number) for number in range(20)]
        assert torch_uvm.stats()["records"] == 20, "not all are known"
        kept += [make(number) for number in range(20, 60)]
        for number, each in enumerate(kept):
            assert (each == number).all().item(), number
        stats = torch_uvm.stats()
        assert stats["written_back"]["bytes"] > 0 and stats["fetched"]["bytes"] > 0
        """,
        env=EMULATED,
    )


@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_a_limit_above_the_free_memory_changes_nothing(spawn: Spawn, limit: str | None) -> None:
    spawn(
        f"""
        import torch_uvm
        torch_uvm.emulated.configure(memory="256MiB")
        torch_uvm.enable(budget="auto", limit={limit!r})
        assert torch_uvm.get_budget() == 240 << 20
        torch_uvm.set_budget("250MiB")
        assert torch_uvm.get_budget() == 250 << 20
        """,
        env=EMULATED,
    )


def test_a_budget_of_bytes_is_at_most_the_limit(spawn: Spawn) -> None:
    spawn(
        """
        import torch_uvm
        torch_uvm.emulated.configure(memory="256MiB")
        torch_uvm.enable(budget="64MiB", limit="32MiB")
        assert torch_uvm.get_budget() == 32 << 20
        """,
        env=EMULATED,
    )
