"""Traces with holds: the device's own times, the program's pace, and plans from both."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from torch_uvm._tools.access_traces import Operator, OperatorGroup, Storage, Trace
from torch_uvm._tools.cards import load_card
from torch_uvm._tools.operator_times import device_times
from torch_uvm._tools.plans import Loop
from torch_uvm.traces import read_trace

TRACES = Path(__file__).resolve().parent.parent / "benchmarks" / "traces"
NAMES = ("aten::mm", "aten::add_", "aten::sum")


def looping(ms: list[float], holds: list[int]) -> Trace:
    """Iterations of three operators on one storage. ``ms``: by iteration, of each operator."""
    operators = [
        Operator(name, 10.0 * (3 * step + at), False, (), (1,))
        for step in range(len(ms))
        for at, name in enumerate(NAMES)
    ]
    groups = [OperatorGroup(at, 1, 1e3 * ms[at // 3]) for at in range(len(operators))]
    return Trace((None,), {1: Storage(0, 4096, True)}, operators, groups, holds=holds)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Six steps on a GPU, all with the device's own times."""
    path = tmp_path_factory.mktemp("recorded") / "run.trace"
    path.write_bytes(lzma.decompress((TRACES / "2k_tokens.jsonl.xz").read_bytes()))
    trace = read_trace(path)
    return device_times(trace, len(trace.operators) // 6).trace


def with_slow_host(trace: Trace, factor: float) -> Trace:
    """The trace as on a slow host: longer durations in its first two iterations, and holds from then on."""
    held = len(trace.operators) // 2
    groups = [replace(it, us=it.us * factor) if it.first < held else it for it in trace.groups]
    return replace(trace, groups=groups, holds=[held])


class TestDeviceTimes:
    def test_durations_behind_the_first_hold_count_everywhere(self) -> None:
        found = device_times(looping([9, 4, 3, 1, 1, 1], [9]), 3)
        assert [it.us for it in found.trace.groups] == [1e3] * 18
        assert found.program_ms == pytest.approx(12) and found.first == 6

    def test_a_hold_in_the_middle_of_an_iteration(self) -> None:
        trace = looping([3, 3, 1, 1], [5])
        trace.groups[5] = OperatorGroup(5, 1, 1e3)
        found = device_times(trace, 3)
        assert [it.us for it in found.trace.groups] == [1e3] * 12
        assert found.program_ms == pytest.approx(9) and found.first == 2

    def test_a_host_that_falls_behind_once_does_not_count(self) -> None:
        trace = looping([9, 9, 1, 2, 3], [6])
        trace.groups[7] = OperatorGroup(7, 1, 200e3)
        found = device_times(trace, 3)
        assert [it.us for it in found.trace.groups] == [2e3, 3e3, 2e3] * 5
        assert found.program_ms == pytest.approx(27) and found.first == 3

    @pytest.mark.parametrize("holds", [[], [2], [10]], ids=["none", "too early", "too late"])
    def test_without_iterations_on_both_sides_it_stays(self, holds: list[int]) -> None:
        trace = looping([3, 3, 1, 1], holds)
        found = device_times(trace, 3)
        assert found.trace is trace and found.program_ms == 0 and found.first is None


class TestLoop:
    def test_in_core_it_takes_the_programs_pace(self, recorded: Trace) -> None:
        plain = Loop(recorded, load_card("h200"))
        slow = Loop(with_slow_host(recorded, 3), load_card("h200"))
        assert slow.whole.in_core_ms == pytest.approx(plain.in_core_ms, rel=0.1)
        assert slow.in_core_ms == pytest.approx(3 * slow.whole.in_core_ms, rel=0.1)
        fits = slow.point(2 * slow.memory.peak_bytes)
        assert fits.step_ms == pytest.approx(slow.in_core_ms)

    @pytest.mark.parametrize("slow", [3, 4, 5])
    def test_no_single_iteration_decides(self, recorded: Trace, slow: int) -> None:
        """One of the three with the device's own times takes twice as long, and an operator of it 200 ms."""
        trace, size = with_slow_host(recorded, 3), len(recorded.operators) // 6
        groups = [replace(it, us=it.us * (2 if it.first // size == slow else 1)) for it in trace.groups]
        late = next(at for at, it in enumerate(groups) if it.first >= slow * size)
        groups[late] = replace(groups[late], us=200e3)
        steady, jumpy = Loop(trace, load_card("h200")), Loop(replace(trace, groups=groups), load_card("h200"))
        assert jumpy.in_core_ms == pytest.approx(steady.in_core_ms, rel=0.01)
        budget = steady.memory.peak_bytes // 2
        assert jumpy.point(budget).step_ms == pytest.approx(steady.point(budget).step_ms, rel=0.05)

    def test_a_device_that_is_no_faster_alone_has_its_own_pace(self, recorded: Trace) -> None:
        loop = Loop(with_slow_host(recorded, 0.5), load_card("h200"))
        assert loop.pace == 1 and loop.in_core_ms == loop.whole.in_core_ms

    def test_a_device_that_takes_no_time(self, recorded: Trace) -> None:
        trace = replace(recorded, groups=[replace(it, us=0.0) for it in recorded.groups])
        loop = Loop(trace, load_card("h200"))
        assert loop.pace == 1 and loop.in_core_ms == 0

    def test_where_the_link_is_slower_the_host_does_not_count(self, recorded: Trace) -> None:
        card, budget = load_card("h200"), 3 << 29
        plain = Loop(recorded, card).point(budget).step_ms
        slow = Loop(with_slow_host(recorded, 2), card)
        assert plain is not None and plain > slow.in_core_ms
        assert slow.point(budget).step_ms == pytest.approx(plain, rel=0.05)
