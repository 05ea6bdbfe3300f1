"""Schedules as objects: made from traces, predicted, checked; beside what the engine does."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _budget_programs import MIB, mlp
from _budget_programs import no_budget_afterwards as no_budget_afterwards
from _schedule_check import check_schedule
from _traced_schedules import Schedule, schedule_of
from torch.nn import functional as F

import torch_uvm
from torch_uvm import traces
from torch_uvm._tools.cards import LinkRates

WEIGHT = 64 * MIB
#: A weight crosses the link in 1 ms, either way.
RATES = LinkRates(into=WEIGHT * 1e3, out=WEIGHT * 1e3, in_place=WEIGHT * 1e3)


def ring(
    path: Path,
    weights: int = 4,
    writes: bool = True,
    us: float = 2000,
    rounds: int = 8,
    pauses: int = 0,
    reads: bool = False,
) -> traces.Trace:
    """Operators that use one weight each, in turn, with operators between them that use none or read it."""
    lines: list[dict[str, Any]] = [
        {
            "format": "torch_uvm accesses",
            "version": 3,
            "units": {"time": "us", "size": "bytes"},
            "budgets": [None],
        }
    ]
    lines += [{"storage": each, "device": 0, "bytes": WEIGHT, "resident": True} for each in range(weights)]
    for at in range(rounds * weights * (1 + pauses)):
        first = at % (1 + pauses) == 0
        used = [at // (1 + pauses) % weights] if first or reads else []
        accesses = {"reads": used, "writes": []} if not (writes and first) else {"reads": [], "writes": used}
        lines.append({"operator": f"op{used}", "time": at, "in_place_ok": False} | accesses)
        lines.append({"ran": at, "operators": 1, "us": us})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return traces.read_trace(path)


def budget_for(storages: int) -> int:
    """Leaves room for these bytes behind the parts for staging and the reserve."""
    return int(storages / (1 - 4 / 128) / (1 - 1 / 64)) + MIB


@pytest.fixture
def schedule(tmp_path: Path) -> Schedule:
    """Between two uses of weights there are 4 ms for 1 ms in and 1 ms out."""
    return schedule_of(ring(tmp_path / "run.trace", pauses=2), budget_for(3 * WEIGHT), rates=RATES)


class TestOfATrace:
    @pytest.mark.parametrize(("room", "fetched"), [(4, 0), (3, 2), (2, 4), (1, 4)])
    def test_what_does_not_fit_comes_and_goes(self, tmp_path: Path, room: int, fetched: int) -> None:
        made = schedule_of(ring(tmp_path / "run.trace"), budget_for(room * WEIGHT))
        assert len(made.operators) % 4 == 0 and len(made.values) == 4
        rounds = len(made.operators) // 4
        assert made.in_core_ms == pytest.approx(8 * rounds)
        assert room * WEIGHT <= made.capacity < (room + 1) * WEIGHT
        assert made.bytes_of("fetch") == made.bytes_of("write_back")
        assert made.bytes_of("fetch") <= fetched * rounds * WEIGHT
        assert (made.bytes_of("fetch") > 0) is (fetched > 0)
        assert check_schedule(made) == []

    def test_transfers_that_operators_hide_cost_nothing(self, schedule: Schedule) -> None:
        assert schedule.bytes_of("fetch") > 0
        assert schedule.predicted_ms == pytest.approx(schedule.in_core_ms)

    def test_transfers_that_nothing_hides_are_waited_for(self, tmp_path: Path) -> None:
        made = schedule_of(ring(tmp_path / "run.trace", us=1), budget_for(WEIGHT), rates=RATES)
        # With room for one weight, each leaves (1 ms) before the next one comes (1 ms).
        assert made.predicted_ms == pytest.approx(2.001 * len(made.operators), rel=0.01)
        assert check_schedule(made) == []

    def test_what_is_only_read_is_dropped(self, tmp_path: Path) -> None:
        made = schedule_of(ring(tmp_path / "run.trace", writes=False), budget_for(2 * WEIGHT))
        assert made.bytes_of("write_back") == 0 < made.bytes_of("drop") == made.bytes_of("fetch")
        assert check_schedule(made) == []

    def test_what_is_read_behind_its_last_write_is_written_back_early(self, tmp_path: Path) -> None:
        trace = ring(tmp_path / "run.trace", weights=2, pauses=1, reads=True)
        made = schedule_of(trace, budget_for(WEIGHT), rates=RATES)
        left = [it for it in made.transfers if it.kind == "write_back"]
        assert len(left) == len(made.operators) // 2 and all(it.stays == 1 for it in left)
        assert check_schedule(made) == []
        # 2 ms to write and 2 to read, and 1 to fetch: the write-back of 1 ms hides behind the reads.
        assert made.predicted_ms == pytest.approx(2.5 * len(made.operators))

    @pytest.mark.parametrize("rounds", [1, 2])
    def test_no_iteration_that_repeats(self, tmp_path: Path, rounds: int) -> None:
        with pytest.raises(ValueError, match="no iteration that repeats"):
            schedule_of(ring(tmp_path / "run.trace", rounds=rounds), 4 * WEIGHT)

    def test_a_cache_that_is_replaced_makes_a_schedule_of_two_steps(self, tmp_path: Path) -> None:
        """The old one is freed once the new one is made, so there are two of them for an operator."""
        path = tmp_path / "trace"
        ring(path, weights=2)
        lines = [json.loads(line) for line in path.read_text().splitlines()][:3]
        lines.append({"storage": 100, "device": 0, "bytes": WEIGHT, "resident": True})
        for step in range(12):
            old, new = 100 + step, 101 + step
            for at, (name, reads) in enumerate(
                (("cat", [old]), ("use", [new]), ("first", [0]), ("second", [1]))
            ):
                number = 4 * step + at
                lines.append(
                    {"operator": name, "time": number, "in_place_ok": False, "reads": reads, "writes": []}
                )
                if at == 0:
                    lines += [{"birth": new, "device": 0, "bytes": WEIGHT}, {"death": old}]
                lines.append({"ran": number, "operators": 1, "us": 2000})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        made = schedule_of(traces.read_trace(path), budget_for(3 * WEIGHT), rates=RATES)
        assert (made.steps, len(made.operators), len(made.values)) == (2, 8, 4)
        assert check_schedule(made) == []
        assert made.in_core_ms == pytest.approx(8)
        assert made.bytes_of("fetch") == 2 * WEIGHT, "a weight leaves for the second cache, in each step"
        assert made.predicted_ms == pytest.approx(8)

    def test_no_durations(self, tmp_path: Path) -> None:
        trace = ring(tmp_path / "run.trace")
        trace.groups.clear()
        with pytest.raises(ValueError, match="no durations"):
            schedule_of(trace, 4 * WEIGHT)
        made = schedule_of(trace, 4 * WEIGHT, step_ms=7)
        assert made.in_core_ms == pytest.approx(7)

    def test_an_operator_above_the_budget(self, tmp_path: Path) -> None:
        made = schedule_of(ring(tmp_path / "run.trace"), WEIGHT // 2)
        assert any("the capacity is" in each for each in check_schedule(made))
        assert made.predicted_ms == math.inf


class TestCheck:
    """The checks find what is wrong."""

    def change(self, schedule: Schedule, kind: str, to: Callable[[Any], list[Any]]) -> list[str]:
        first = next(it for it in schedule.transfers if it.kind == kind)
        others = tuple(it for it in schedule.transfers if it is not first)
        return check_schedule(replace(schedule, transfers=others + tuple(to(first))))

    def test_of_a_sound_schedule(self, schedule: Schedule) -> None:
        assert schedule.transfers and check_schedule(schedule) == []

    def test_a_missing_fetch(self, schedule: Schedule) -> None:
        assert any("on the host" in each for each in self.change(schedule, "fetch", lambda it: []))

    def test_a_missing_eviction(self, schedule: Schedule) -> None:
        assert any("is fetched" in each for each in self.change(schedule, "write_back", lambda it: []))

    def test_a_write_behind_a_write_back(self, tmp_path: Path) -> None:
        made = schedule_of(ring(tmp_path / "t", weights=2, pauses=1), budget_for(WEIGHT))
        found = self.change(made, "write_back", lambda it: [replace(it, after=it.after - 1, stays=1)])
        assert any("behind its write-back" in each for each in found)

    def test_too_little_room(self, schedule: Schedule) -> None:
        found = check_schedule(replace(schedule, capacity=schedule.capacity - WEIGHT))
        assert any("the capacity is" in each for each in found)


class TestBesideTheEngine:
    @pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
    def test_it_moves_at_least_what_the_schedule_says(self, tmp_path: Path, share: float) -> None:
        """A trace recorded without a budget gives the schedule that the engine follows within one."""

        def train(steps: int) -> list[tuple[int, int]]:
            """Bytes copied, and used in place, by step."""
            torch.manual_seed(0)
            model = mlp(512, 30).to("emu")  # storages of 1 MiB, a hundredth of the budget
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            batch, label = torch.randn(64, 512).to("emu"), torch.zeros(64, dtype=torch.long, device="emu")
            moved = []
            for _ in range(steps):
                before = torch_uvm.stats()
                F.cross_entropy(model(batch), label).backward()
                optimizer.step()
                optimizer.zero_grad()
                after = torch_uvm.stats()
                names = ("fetched", "written_back", "used_in_place")
                fetched, written, in_place = (after[name]["bytes"] - before[name]["bytes"] for name in names)
                moved.append((fetched + written, in_place))
            return moved

        gc.collect()
        torch_uvm.memory.empty_cache()
        torch_uvm.memory.reset_peak_memory_stats()
        # Roomy: operators are watched, and nothing moves.
        torch_uvm.enable(budget="256MiB", optimizer="in_place")
        with torch_uvm.tools.record_accesses(tmp_path / "run.trace"):
            assert sum(sum(each) for each in train(6)) == 0
        budget = int(share * torch_uvm.memory.max_memory_allocated(torch.device("emu")))
        made = schedule_of(traces.read_trace(tmp_path / "run.trace"), budget, step_ms=10)
        assert check_schedule(made) == []
        gc.collect()
        torch_uvm.set_budget(budget)
        moved = train(12)[4:]
        link, in_place = (sum(each[at] for each in moved) / len(moved) for at in range(2))
        # The engine's schedule allows for what operators allocate while they run, which is in no trace.
        assert made.bytes_in_place() <= in_place <= made.bytes_in_place() + 8 * MIB
        # Fragments: some storages are evicted that the schedule keeps.
        assert link >= 0.95 * (made.bytes_of("fetch") + made.bytes_of("write_back"))
