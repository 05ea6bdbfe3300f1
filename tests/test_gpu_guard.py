"""Tests of the GPU guard (_gpu_guard.py) on the emulator."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import _gpu_guard
import pytest
import torch
from _gpu_guard import (
    GIB,
    LEAST_FREE,
    MARGIN,
    MIB,
    Guard,
    Refused,
    balloon,
    check_afterwards,
    check_program,
    check_room,
    environment,
    room,
    room_beside_a_balloon,
)
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS.parent / "benchmarks"))

import _runs  # noqa: E402


@pytest.fixture
def guard() -> Iterator[Guard]:
    torch_uvm.memory.empty_cache()
    held = Guard(64 * MIB).hold()
    yield held
    held.release()


class TestRoom:
    """What is free less 6 GiB, while no managed memory has been allocated yet."""

    @pytest.fixture(autouse=True)
    def nothing_allocated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_C, "in_use", lambda: False)

    def test_enough_on_every_card(self) -> None:
        found = check_room(73 * GIB, {"a": lambda: [79 * GIB, 140 * GIB], "b": lambda: None})
        assert found == {"a": [79 * GIB, 140 * GIB]}

    @pytest.mark.parametrize("free", [[7 * GIB - 1], [140 * GIB, 7 * GIB - 1], [0]])
    def test_too_little_on_one_card_by_one_reader(self, free: list[int]) -> None:
        with pytest.raises(Refused, match=f"card {len(free) - 1} has .* \\(b\\)"):
            check_room(GIB, {"a": lambda: [140 * GIB], "b": lambda: free})

    def test_the_room_is_that_of_the_fullest_card_by_any_reader(self) -> None:
        readers = {"a": lambda: [79 * GIB, 140 * GIB], "b": lambda: [78 * GIB], "c": lambda: None}
        assert room(readers) == 72 * GIB
        check_room(room(readers), readers)
        with pytest.raises(Refused, match="72.00 GiB .* takes at least 78.0 GiB"):
            check_room(room(readers) + 1, readers)

    def test_a_card_that_is_almost_full_has_no_room(self) -> None:
        assert room({"a": lambda: [MARGIN + 1]}) == 1
        with pytest.raises(Refused, match="more than 6 GiB are needed"):
            room({"a": lambda: [140 * GIB, MARGIN]})

    @pytest.mark.parametrize("reading", [None, []])
    def test_a_card_without_a_reading_is_refused(self, reading: list[int] | None) -> None:
        for refused in (lambda readers: check_room(GIB, readers), room):
            with pytest.raises(Refused, match="no reader"):
                refused({"a": lambda: reading})

    def test_refused_after_an_allocation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_C, "in_use", lambda: True)
        monkeypatch.setattr(_C, "peak_managed_bytes", lambda: 1)
        for refused in (lambda readers: check_room(GIB, readers), room):
            with pytest.raises(Refused, match="before the free memory"):
                refused({"a": lambda: [140 * GIB]})

    def test_benchmarks_have_the_same_rule(self) -> None:
        """Those that must not import torch_uvm have it from a module of their own."""
        assert _runs.MARGIN == MARGIN


class TestBalloon:
    @pytest.fixture(autouse=True)
    def nothing_allocated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_C, "in_use", lambda: False)

    @pytest.mark.parametrize(
        ("free", "other", "limit"),
        [(9 * GIB, 10 * GIB, 9 * GIB // 2), (8 * GIB, 7 * GIB, 7 * GIB // 2), (0, 10 * GIB, 0)],
    )
    def test_the_limit_is_half_of_what_any_reader_reports_free(
        self, free: int, other: int, limit: int
    ) -> None:
        readers = {"a": lambda: [free, 100 * GIB], "b": lambda: [other], "c": lambda: None}
        assert room_beside_a_balloon(readers) == limit

    def test_without_a_reading_there_is_no_limit(self) -> None:
        with pytest.raises(Refused, match="no reader"):
            room_beside_a_balloon({"a": lambda: None})

    def test_no_limit_after_an_allocation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_C, "in_use", lambda: True)
        monkeypatch.setattr(_C, "peak_managed_bytes", lambda: 1)
        with pytest.raises(Refused, match="before the free memory"):
            room_beside_a_balloon({"a": lambda: [8 * GIB]})

    def test_takes_all_but_what_it_is_to_leave(self) -> None:
        device = torch.device("emu", 0)
        module = torch.get_device_module(device)
        module.empty_cache()
        before = module.mem_get_info(device)[0]
        held = balloon(16 * MIB, device)
        assert module.mem_get_info(device)[0] == 16 * MIB
        assert not torch_uvm.is_managed(held)
        with pytest.raises(Refused, match=r"0.02 GiB free; the balloon is to leave 0.02 GiB"):
            balloon(16 * MIB, device)
        del held
        module.empty_cache()
        assert module.mem_get_info(device)[0] == before

    def test_managed_memory_is_no_balloon(self) -> None:
        torch_uvm.enable()
        with pytest.raises(Refused, match="torch_uvm is on"):
            balloon(16 * MIB, torch.device("emu", 0))


class TestLimit:
    def test_cannot_be_raised_by_any_call(self, guard: Guard) -> None:
        raises: tuple[Callable[[], object], ...] = (
            lambda: torch_uvm.set_limit(None),
            lambda: torch_uvm.set_limit("65MiB"),
            lambda: torch_uvm.enable(limit="5GiB"),
            lambda: _C.set_limit(None),
            lambda: _C.set_option("limit", "none"),
            lambda: _C.set_option("limit", "1TiB"),
            lambda: _C.load_options("populate:false,limit:65MiB"),
        )
        for call in raises:
            with pytest.raises(Refused):
                call()
            assert _C.get_limit() == 64 * MIB

    def test_outlives_options_that_do_not_name_it(
        self, guard: Guard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as replaced:  # undone before the guard restores the originals
            replaced.setitem(guard._real, "load_options", lambda text: guard._real["set_limit"](None))
            _C.load_options("populate:true")
            assert _C.get_limit() == 64 * MIB

    def test_can_be_lowered_and_reset(self, guard: Guard) -> None:
        torch_uvm.set_limit("1MiB")
        assert _C.get_limit() == MIB
        guard.reset()
        assert _C.get_limit() == 64 * MIB

    def test_holds_for_allocations(self, guard: Guard) -> None:
        x = torch_uvm.memory.empty(60 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch_uvm.memory.empty(8 * MIB, dtype=torch.uint8)
        assert _C.managed_bytes() <= 64 * MIB
        del x

    def test_check_accepts_use_within_the_limit(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch
            from _gpu_guard import MIB, Guard, check_room
            check_room(64 * MIB, {"a": lambda: [7 << 30]})
            guard = Guard(64 * MIB).hold()
            import torch_uvm
            x = torch_uvm.memory.empty(60 * MIB, dtype=torch.uint8, device="cpu")
            guard.check()
            torch_uvm.set_limit(MIB)
            guard.check()
            """,
            env={"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )

    def test_check_notices_a_peak_above_it(self, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_C, "in_use", lambda: True)
        monkeypatch.setattr(_C, "peak_managed_bytes", lambda: 64 * MIB + 1)
        with pytest.raises(Refused, match="were reserved"):
            guard.check()

    def test_check_notices_a_limit_that_is_gone(self, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
        for limit in (None, 65 * MIB):
            monkeypatch.setattr(_C, "get_limit", lambda limit=limit: limit)
            with pytest.raises(Refused, match="to stay at or below"):
                guard.check()

    def test_check_notices_a_card_that_is_full(self, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_C, "peak_managed_bytes", lambda: 0)  # other tests of this process had more
        monkeypatch.setattr(_gpu_guard, "free_by_nvml", lambda: [140 * GIB, LEAST_FREE - 1])
        with pytest.raises(Refused, match="had .* bytes free"):
            guard.check()
        monkeypatch.setattr(_gpu_guard, "free_by_nvml", lambda: [140 * GIB, LEAST_FREE])
        guard.check()

    @pytest.mark.parametrize(
        ("limit", "peak", "lowest_free", "wrong"),
        [
            (None, 0, None, "the limit is None"),
            (GIB + 1, 0, None, "to stay at or below"),
            (GIB, GIB + 1, None, "were reserved"),
            (GIB, GIB, LEAST_FREE - 1, "bytes free"),
        ],
    )
    def test_what_another_process_did(
        self, limit: int | None, peak: int, lowest_free: int | None, wrong: str
    ) -> None:
        check_afterwards(GIB, GIB, GIB, LEAST_FREE)
        with pytest.raises(Refused, match=wrong):
            check_afterwards(GIB, limit, peak, lowest_free)

    def test_release_restores_the_limit(self) -> None:
        torch_uvm.set_limit("3GiB")
        Guard(GIB).hold().release()
        assert _C.get_limit() == 3 * GIB
        torch_uvm.set_limit(None)
        assert _C.get_limit() is None


class TestOtherProcesses:
    def test_start_with_the_limit(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm, unittest
            assert torch_uvm._C.get_limit() == 64 << 20
            with unittest.TestCase().assertRaises(torch.OutOfMemoryError):
                torch_uvm.memory.empty(65 << 20, dtype=torch.uint8, device="cpu")
            """,
            env=environment(64 * MIB),
        )

    @pytest.mark.parametrize(
        "text",
        [
            "torch_uvm.set_limit(None)",
            "torch_uvm.set_limit(limit = None)",
            "torch_uvm.set_limit('8GiB')",
            'torch_uvm.enable(limit="8GiB")',
            "limit:none",
            'set_limit("none")',
            "set_limit(limit=' None')",
            "torch_uvm.enable(limit='none')",
            "run --limit none train.py",
            '["--limit", "none"]',
            "populate:true,limit:4097MiB",
            "set_limit(8_000_000_000)",
        ],
    )
    def test_may_not_raise_it(self, text: str) -> None:
        with pytest.raises(Refused):
            check_program(text, 4 * GIB)

    @pytest.mark.parametrize(
        "text",
        [
            "torch_uvm.set_limit('64MiB')",
            "limit:4GiB",
            "x = 1",
            "limit=1024",
            "host_limit:none,limit:4GiB",
            "enable(limit=None)",
            "enable(host_limit='none')",
            "run --host-limit none",
            "set_host_limit('none')",
        ],
    )
    def test_may_contain_anything_else(self, text: str) -> None:
        check_program(text, 4 * GIB)
