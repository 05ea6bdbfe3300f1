"""Makes calls of the emulated runtime fail, one at a time, at every call that a scenario makes.

A scenario is a function that creates its state, attempts its steps one by one, and checks bytes. A failed
step must raise as documented; the scenario checks the state after it. Nothing may leak from a run.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from typing import Any

import torch

import torch_uvm
from torch_uvm import _C

emu: Any = torch.emu  # type: ignore[attr-defined]
Scenario = Callable[["Attempts"], None]

#: Tests all calls instead of a selection: `make faults`.
LONG = os.environ.get("TORCH_UVM_FAULTS") == "long"
_MADE_TO_FAIL = re.compile(r"emulated runtime: (\w+) was made to fail")


class Attempts:
    """Attempts steps, of which one may fail, and records the error."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, step: Callable[[], Any], otherwise: Any = None) -> Any:
        """Returns the result of `step`, or `otherwise` if it failed."""
        try:
            return step()
        except Exception as error:
            assert self.error is None, f"{error!r} after {self.error!r}"
            check_error(error)
            self.error = error.with_traceback(None)
            return otherwise


def check_error(error: Exception) -> None:
    """A refused allocation raises torch.OutOfMemoryError; any other failure raises another RuntimeError."""
    failed = _MADE_TO_FAIL.search(str(error))
    if failed is None:
        raise error
    refused = failed[1].startswith("allocate_")
    assert isinstance(error, torch.OutOfMemoryError) == refused, repr(error)
    assert isinstance(error, RuntimeError), repr(error)


def _settled() -> tuple[int, ...]:
    """Counts that must return to their values. Releases caches first."""
    gc.collect()
    torch.accelerator.synchronize()
    torch_uvm.memory.empty_cache()
    torch.accelerator.empty_cache()
    assert _C.check_allocator() is None, _C.check_allocator()
    assert _C.check_residency() is None, _C.check_residency()
    assert _C.emu_check_plain_allocator() is None
    assert _C.pending_updates() == 0
    managed, ours = torch_uvm.memory.memory_stats(), torch.accelerator.memory_stats()
    return (
        managed["allocated_bytes.all.current"],
        managed["allocation.all.current"],
        managed["requested_bytes.all.current"],
        ours["allocated_bytes.all.current"],
        torch_uvm.stats()["records"],
    )


def _fail_at(nth: int, name: str, scenario: Scenario) -> bool:
    """Returns whether the scenario made that call."""
    attempts = Attempts()
    _C.emu_fail_call(name, nth)
    try:
        scenario(attempts)
    except BaseException as error:
        error.add_note(f"call {nth} of {name!r} was made to fail")
        raise
    finally:
        missing = _C.emu_clear_failures()
    return missing == 0


def _without_end(nth: int, name: str, scenario: Scenario) -> int:
    """Checks that event pools do not grow with every run. Returns their new size."""
    for _ in range(5):
        before = _C.emu_live_objects()
        for _ in range(8):
            _fail_at(nth, name, scenario)
        _settled()
        if _C.emu_live_objects() - before < 8:
            return _C.emu_live_objects()
    raise AssertionError(f"call {nth} of {name!r}: 8 times and again, {_C.emu_live_objects() - before} more")


def each_call_fails(scenario: Scenario, name: str = "*", every: int = 1, first: int = 1) -> int:
    """Runs `scenario` repeatedly, with a different call failing each time, until every call has failed once.

    name: counts only calls of this name; "*": all calls
    every, first: fail every n-th call, from the `first` on. The long form divides `every` by 71: it fails all
        calls, or one in 7 where the short form fails one in 499.

    Returns the number of failed calls.
    """
    if LONG:
        every, first = max(every // 71, 1), 1  # training makes thousands of calls
    for _ in range(32):
        emu.Stream()  # creates the whole pool of streams
    for _ in range(2):
        scenario(Attempts())  # creates one-time objects
        before = _settled()
    objects = _C.emu_live_objects()
    failed = 0
    nth = first
    while True:
        reached = _fail_at(nth, name, scenario)
        scenario(Attempts())  # the next run succeeds
        note = f"call {nth} of {name!r}"
        after = _settled()
        assert after == before, f"{note}: left {after} after {before}"
        if _C.emu_live_objects() > objects:
            objects = _without_end(nth, name, scenario)
            assert _settled() == before, note
        if not reached:
            return failed
        failed += 1
        nth += every
