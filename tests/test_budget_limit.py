"""Budgets beside the limit of managed memory, no budget, and the default limit of pinned memory."""

from __future__ import annotations

import pytest
from _spawn import Run, Spawn

import torch_uvm

START = """
import unittest, warnings
import torch, torch_uvm
from torch_uvm import _C
MIB = 1024**2
warnings.simplefilter("always")
def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]
def use(device=0):
    with torch_uvm.enabled():
        return torch.ones(4, device=f"emu:{device}")
def fill(count):
    return [torch_uvm.memory.full((MIB,), float(i), device="emu") for i in range(count)]  # 4 MiB each
"""


def on(conf: str) -> dict[str, str]:
    return {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": conf}


@pytest.fixture(name="run")
def run_on_a_small_device(spawn: Spawn) -> Run:
    return spawn.after(START, env=on("emulated_memory:64MiB"))


class TestBesideALimit:
    def test_a_budget_is_at_most_the_limit_whichever_comes_first(self, run: Run) -> None:
        run("""
torch_uvm.set_budget("48MiB")
assert torch_uvm.get_budget() == 48 * MIB
torch_uvm.set_limit("40MiB")
assert torch_uvm.get_budget() == 40 * MIB  # before it takes effect
(first,) = said(use)
assert "the budget of device 0 is 40.00 MiB, all that" in first and "48.00 MiB were asked" in first
assert torch_uvm.get_budget() == _C.budget(0) == 40 * MIB

(less,) = said(lambda: torch_uvm.set_limit("32MiB"))
assert "is 32.00 MiB, all that" in less and torch_uvm.get_budget() == 32 * MIB
assert said(lambda: torch_uvm.set_limit("none")) == [] and torch_uvm.get_budget() == 48 * MIB
_C.set_option("limit", "20MiB")
assert torch_uvm.get_budget() == 20 * MIB

(cut,) = said(lambda: torch_uvm.enable(budget="75%", limit="36MiB"))
assert "36.00 MiB" in cut and "75% were asked for" in cut and torch_uvm.get_budget() == 36 * MIB
assert said(lambda: torch_uvm.set_budget("auto")) == [] and torch_uvm.get_budget() == 36 * MIB
torch_uvm.set_limit(None)
assert torch_uvm.get_budget() == 60 * MIB
""")

    def test_a_lower_limit_evicts(self, run: Run) -> None:
        run("""
torch_uvm.set_budget("48MiB")
kept = fill(11)
assert _C.managed_bytes() > 40 * MIB
torch_uvm.set_limit("24MiB")
assert _C.managed_bytes() <= 24 * MIB, _C.managed_bytes()
assert [each.sum().item() / MIB for each in kept] == list(range(11))
kept += fill(4)
assert torch_uvm.memory.memory_stats()["num_ooms"] == 0 and _C.managed_bytes() <= 24 * MIB
""")

    def test_budgets_together_above_the_limit_are_reduced_in_proportion(self, run: Run) -> None:
        run(
            """
torch_uvm.set_budget("48MiB", device=0)
torch_uvm.set_budget("24MiB", device=1)
torch_uvm.set_limit("36MiB")
use(0)
assert torch_uvm.get_budget(0) == 36 * MIB
assert torch_uvm.get_budget(1) == 12 * MIB
use(1)
assert [torch_uvm.get_budget(i) for i in range(2)] == [24 * MIB, 12 * MIB]
torch_uvm.set_limit("72MiB")
assert [torch_uvm.get_budget(i) for i in range(2)] == [48 * MIB, 24 * MIB]
torch_uvm.set_limit("36MiB")
torch_uvm.set_budget(None, device=1)
assert [torch_uvm.get_budget(i) for i in range(2)] == [36 * MIB, None]
""",
            env=on("emulated_memory:64MiB,emulated_devices:2"),
        )

    def test_memory_of_the_host_takes_its_part_from_the_budget(self, run: Run) -> None:
        run("""
torch_uvm.set_budget("60MiB")
torch_uvm.set_limit("32MiB")
kept = fill(10)
assert _C.managed_bytes() > 24 * MIB
host = [torch_uvm.memory.ones(MIB, device="cpu") for _ in range(3)]  # 12 MiB
assert torch_uvm.get_budget() <= 28 * MIB and _C.managed_bytes() <= 32 * MIB
assert [each.sum().item() / MIB for each in kept + host] == [*range(10), 1, 1, 1]
with unittest.TestCase().assertRaisesRegex(torch.OutOfMemoryError, "limit"):
    torch_uvm.memory.ones(8 * MIB, device="cpu")  # 44 MiB in 32
""")

    def test_a_failed_change_of_the_limit_changes_nothing(self, run: Run) -> None:
        run("""
torch_uvm.set_limit("40MiB")
torch_uvm.set_budget("48MiB")
with unittest.TestCase().assertRaises(ValueError):
    torch_uvm.set_limit(-1)
assert torch_uvm.memory.get_limit() == torch_uvm.get_budget() == 40 * MIB
""")


class TestNone:
    def test_a_limit_is_removed_by_its_name(self) -> None:
        for name in ("none", " NONE "):
            torch_uvm.set_limit("3GiB")
            torch_uvm.set_limit(name)
            assert torch_uvm.memory.get_limit() is None
            torch_uvm.enable(limit="3GiB", host_limit="2GiB")
            torch_uvm.enable(limit=name, host_limit=name)
            assert torch_uvm.memory.get_limit() is None and torch_uvm.memory.get_host_limit() is None
        torch_uvm.set_host_limit("auto")

    @pytest.mark.parametrize("budget", ["None", "'none'"])
    def test_a_device_without_a_budget_warns_once(self, run: Run, budget: str) -> None:
        run(f"""
assert said(lambda: torch_uvm.enable(budget={budget})) == []  # it has no effect yet
(only,) = said(use)
assert "device 0 has no budget: the driver moves pages by faults" in only
assert said(lambda: torch_uvm.set_budget({budget})) == [] == said(use)
""")

    def test_a_device_that_loses_its_budget_warns(self, run: Run) -> None:
        run("""
torch_uvm.enable()
assert said(use) == []
(only,) = said(lambda: torch_uvm.set_budget("none"))
assert "no budget" in only and torch_uvm.get_budget() is None
""")

    def test_nothing_was_asked_for_and_one_memory_are_no_reasons(self, run: Run) -> None:
        run('assert said(lambda: torch_uvm.memory.ones(4, device="emu")) == []')
        run(
            "torch_uvm.enable(budget=None); assert said(use) == []",
            env=on("emulated_profile:gb10,emulated_memory:64MiB"),
        )


class TestHostLimit:
    def test_keeps_a_reserve_by_default(self, run: Run) -> None:
        """It is computed when a budget takes effect, and again when asked for."""
        run("""
def expected():
    available = _C.host_memory_available()
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    return available, available - min(max(total // 16, 2 << 30), available // 2)
for before in (True, False):
    available, spare = expected()
    assert 0 < torch_uvm.memory.get_host_limit() < available
    assert torch_uvm.memory.get_host_limit() <= spare + (1 << 30)
    if before:
        torch_uvm.set_budget("16MiB")
        use()
        in_force = torch_uvm.memory.get_host_limit()
assert torch_uvm.memory.get_host_limit() == in_force  # it stays
kept = fill(8)
torch_uvm.set_host_limit("none")
assert torch_uvm.memory.get_host_limit() is None
torch_uvm.set_host_limit("auto")
assert abs(torch_uvm.memory.get_host_limit() - expected()[1]) < 1 << 30
""")

    def test_is_enforced(self, run: Run) -> None:
        """The engine has the figure that is shown."""
        run("""
torch_uvm.set_budget("16MiB")
kept = fill(8)
_C.set_option("host_limit", "20MiB")
with unittest.TestCase().assertRaisesRegex(torch.OutOfMemoryError, "host_limit"):
    while True:
        kept += fill(1)
_C.set_option("host_limit", "auto")
assert torch_uvm.memory.get_host_limit() > 1 << 28
kept += fill(20 - len(kept))
""")


def test_the_words_are_in_the_messages() -> None:
    with pytest.raises(ValueError, match=r'or None \("none"\)'):
        torch_uvm.set_limit("lots")
    with pytest.raises(ValueError, match=r'"auto", or None \("none"\)'):
        torch_uvm.set_host_limit("lots")
