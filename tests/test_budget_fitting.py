"""The automatic budget follows the device's free memory: other memory grows, finds no room, or goes."""

from __future__ import annotations

import pytest
from _spawn import Run, Spawn

START = """
import time
import torch, torch_uvm
from torch_uvm import _C
MIB = 1024**2
def plain(mib):
    with torch_uvm.disabled():
        return torch.empty(int(mib * MIB), dtype=torch.uint8, device="emu")
def fill(count):
    return [torch.full((MIB,), float(i), device="emu") for i in range(count)]  # 4 MiB each
def check(kept):
    for number, each in enumerate(kept):
        assert (each == number).all().item(), number
def use_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, torch_uvm.get_budget()
        torch.ones(4, device="emu")
def free_memory():
    return _C.device_properties(0)["free_memory"]
"""
ENV = {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": "emulated_memory:64MiB,segment_min:none"}
AUTO = START + 'torch_uvm.enable(budget="auto"); torch.ones(4, device="emu")\n'


@pytest.fixture(name="auto")
def run_with_the_automatic_budget(spawn: Spawn) -> Run:
    return spawn.after(AUTO, env=ENV)


def test_other_memory_makes_it_smaller(auto: Run) -> None:
    """It is looked at where memory is allocated, a few times a second."""
    auto("""
assert torch_uvm.get_budget() == 60 * MIB
taken = plain(24)
use_until(lambda: torch_uvm.get_budget() < 60 * MIB)
assert torch_uvm.get_budget() == (64 - 24 - 4) * MIB, torch_uvm.get_budget()
kept = fill(20)
assert _C.managed_bytes() <= 36 * MIB
check(kept)
""")


def test_what_is_allocated_makes_room(auto: Run) -> None:
    auto("""
kept = fill(24)
check(kept)
taken = plain(24)  # the driver makes room by eviction, and brings back what is used
use_until(lambda: check(kept) is None and free_memory() >= 2 * MIB and torch_uvm.get_budget() <= 42 * MIB)
check(kept)
""")


def test_small_changes_are_left_to_the_reserve(auto: Run) -> None:
    auto("""
taken = plain(0.5)  # a segment of 2 MiB, which is half of the reserve
for count in (0, 14):
    kept = fill(count)
    assert not _C.fit_automatic_budget(0, 0) and torch_uvm.get_budget() == 60 * MIB
""")


def test_it_grows_again(auto: Run) -> None:
    auto("""
taken = [plain(16), plain(0.5)]
_C.fit_automatic_budget(0, 0)
assert torch_uvm.get_budget() == 42 * MIB, torch_uvm.get_budget()
del taken[1]
torch.emu.empty_cache()
assert not _C.fit_automatic_budget(0, 0) and torch_uvm.get_budget() == 42 * MIB  # 2 MiB are not worth it
del taken
torch.emu.empty_cache()
assert not _C.fit_automatic_budget(0, 0) and torch_uvm.get_budget() == 60 * MIB
""")


def test_an_allocation_that_fails_gets_room(auto: Run) -> None:
    """The emulated driver evicts managed memory for other memory, so a call is made to fail."""
    auto("""
kept = fill(24)
check(kept)
for call in (1, 2):  # the allocator of plain memory itself tries twice
    _C.emu_fail_call("allocate_device", call)
taken = plain(40)
assert _C.emu_clear_failures() == 0
assert torch_uvm.get_budget() == (64 - 40 - 4) * MIB, torch_uvm.get_budget()
check(kept)
""")


def test_a_budget_that_was_asked_for_stays(spawn: Spawn) -> None:
    spawn(
        START
        + """
torch_uvm.enable(budget="40MiB")
kept = fill(14)
taken = plain(20)
assert not _C.fit_automatic_budget(0, 0) and not _C.fit_automatic_budget(0, 10 * MIB)
try:
    plain(60)
except torch.OutOfMemoryError as error:
    for part in ("within a budget of 40.00 MiB that was asked for", "torch_uvm.set_budget("):
        assert part in str(error), error
else:
    raise AssertionError("80 MiB in 64")
assert torch_uvm.get_budget() == 40 * MIB
check(kept)
""",
        env=ENV,
    )


def test_from_many_threads(auto: Run) -> None:
    """Threads that fit the budget, allocate, and request budgets do not wait for each other."""
    auto("""
import threading
stop = threading.Event()
def fit():
    while not stop.is_set():
        _C.fit_automatic_budget(0, 4 * MIB)
        _C.fit_automatic_budget(0, 0)
def request():
    while not stop.is_set():
        torch_uvm.set_budget("auto")
others = [threading.Thread(target=each) for each in (fit, request)]
for each in others:
    each.start()
try:
    for _ in range(30):
        kept = fill(10)
        check(kept)
        taken = plain(8)
        del taken
finally:
    stop.set()
    for each in others:
        each.join()
assert _C.check_residency() is None
""")
