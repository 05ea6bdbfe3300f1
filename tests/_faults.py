"""Calls of the emulated runtime that are made to fail, one at a time, wherever a scenario makes one.

A scenario is a function that makes all it needs, tries its steps one by one, and checks bytes. A step that
fails must do so as documented; what it left is the scenario's to check. After each run nothing may be left
that was not there before.
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

#: All places, and not some of them: `make faults`.
LONG = os.environ.get("TORCH_UVM_FAULTS") == "long"
_MADE_TO_FAIL = re.compile(r"emulated runtime: (\w+) was made to fail")


class Attempts:
    """Tries steps, one of which may fail; keeps the error."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, step: Callable[[], Any], otherwise: Any = None) -> Any:
        """What `step` returns, or `otherwise` where it failed."""
        try:
            return step()
        except Exception as error:
            assert self.error is None, f"{error!r} after {self.error!r}"
            check_error(error)
            self.error = error.with_traceback(None)
            return otherwise


def check_error(error: Exception) -> None:
    """A refusal of memory is torch.OutOfMemoryError, any other failure RuntimeError and not that."""
    failed = _MADE_TO_FAIL.search(str(error))
    if failed is None:
        raise error
    refused = failed[1].startswith("allocate_")
    assert isinstance(error, torch.OutOfMemoryError) == refused, repr(error)
    assert isinstance(error, RuntimeError), repr(error)


def _settled() -> tuple[int, ...]:
    """What must be as before; caches are given back."""
    gc.collect()
    torch.accelerator.synchronize()
    torch_uvm.empty_cache()
    torch.accelerator.empty_cache()
    assert _C.check_allocator() is None, _C.check_allocator()
    assert _C.check_residency() is None, _C.check_residency()
    assert _C.emu_check_plain_allocator() is None
    assert _C.pending_updates() == 0
    managed, ours = torch_uvm.memory_stats(), torch.accelerator.memory_stats()
    return (
        managed["allocated_bytes.all.current"],
        managed["allocation.all.current"],
        managed["requested_bytes.all.current"],
        ours["allocated_bytes.all.current"],
        torch_uvm.residency_stats()["records"],
    )


def _fail_at(nth: int, name: str, scenario: Scenario) -> bool:
    """\\return whether there was such a call"""
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
    """Pools of events may grow, but not each time. Returns to how much."""
    for _ in range(5):
        before = _C.emu_live_objects()
        for _ in range(8):
            _fail_at(nth, name, scenario)
        _settled()
        if _C.emu_live_objects() - before < 8:
            return _C.emu_live_objects()
    raise AssertionError(f"call {nth} of {name!r}: 8 times and again, {_C.emu_live_objects() - before} more")


def each_call_fails(scenario: Scenario, name: str = "*", every: int = 1, first: int = 1) -> int:
    """Runs `scenario` again and again, each time with another call made to fail, until all were.

    name: of the calls that are counted; "*": any
    every, first: not each of them, but from the `first` on one in so many; in the long form all, or, of what
        is tried one in 499 of, one in 7

    Returns how many were made to fail.
    """
    if LONG:
        every, first = max(every // 71, 1), 1  # there are thousands in training
    for _ in range(32):
        emu.Stream()  # the whole pool of them
    for _ in range(2):
        scenario(Attempts())  # what is made once
        before = _settled()
    objects = _C.emu_live_objects()
    failed = 0
    nth = first
    while True:
        reached = _fail_at(nth, name, scenario)
        scenario(Attempts())  # all is as ever
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
