"""`python -m torch_uvm plan --from`: predictions of recorded loops, errors, what is written."""

from __future__ import annotations

import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_uvm import cli
from torch_uvm._tools.cards import LinkRates, link_rates, load_card, rates_of_engine
from torch_uvm._tools.deferred_traces import deferred as derived
from torch_uvm._tools.plan_advice import advice
from torch_uvm._tools.plans import (
    DEFERRED,
    IN_PLACE,
    Loop,
    automatic_budgets,
    make_plan,
    room_of,
)
from torch_uvm._tools.schedules import TracedLoop
from torch_uvm.traces import Trace, read_trace

TRACES = Path(__file__).resolve().parent.parent / "benchmarks" / "traces"
GIB = 1 << 30
KINDS = (IN_PLACE, DEFERRED)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop of 379 operators of an H200, whose peak is 5.05 GiB."""
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    path.write_bytes(lzma.decompress((TRACES / "2k_tokens.jsonl.xz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def trace(trace_file: Path) -> Trace:
    return read_trace(trace_file)


@pytest.fixture(scope="module")
def loop(trace: Trace) -> Loop:
    return Loop(trace, load_card("h200"))


@pytest.fixture(scope="module")
def deferred(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """The same loop with deferred updates."""
    path = tmp_path_factory.mktemp("deferred") / "run.trace"
    path.write_bytes(lzma.decompress((TRACES / "2k_tokens_deferred.jsonl.xz").read_bytes()))
    return Loop(read_trace(path), load_card("h200"))


def plan(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What the command prints and writes to stderr.

    Raises:
        SystemExit: it ends with an error.
    """
    assert cli.main(["plan", *argv]) == 0
    said = capsys.readouterr()
    return said.out, said.err


class TestLoop:
    def test_a_budget_that_everything_fits_in(self, loop: Loop) -> None:
        point = loop.point(loop.memory.peak_bytes * 2)
        assert point.step_ms == pytest.approx(loop.in_core_ms)
        assert (point.into, point.out, point.in_place) == (0, 0, 0)

    def test_less_memory_takes_longer(self, loop: Loop) -> None:
        steps = [loop.point(int(size * GIB)).step_ms for size in (4, 2, 1)]
        assert None not in steps
        assert sorted(steps) == steps and steps[0] > loop.in_core_ms  # type: ignore[type-var, operator]

    def test_the_peak_is_what_was_recorded(self, loop: Loop, trace: Trace) -> None:
        recorded = json.loads((TRACES / "index.json").read_text())["2k tokens"]["in_place"]
        assert loop.memory.peak_bytes == pytest.approx(recorded["peak_bytes"], rel=0.002)
        assert loop.memory.peak_bytes > max(it.bytes for it in trace.resident)  # those have no workspaces
        assert sum(it.bytes for it in loop.memory.largest) + loop.memory.added_bytes == loop.memory.peak_bytes
        roles = {it.what: it.storages for it in loop.memory.largest}
        # 12 blocks with four matrices each: a parameter, and two moments.
        assert roles["parameters"] == 48 and roles["optimizer state"] == 96

    def test_the_least_budget_is_of_the_largest_operator(self, loop: Loop) -> None:
        assert loop.memory.largest_operator[1] == "aten::sum"  # with its workspace
        assert loop.point(loop.least_bytes).step_ms is not None
        assert loop.point(loop.least_bytes // 2).step_ms is None


class TestPlan:
    def test_budgets_and_the_knee(self, loop: Loop) -> None:
        found = make_plan([loop], None)
        budgets = [it.budget for it in found.points]
        assert budgets == sorted(budgets, reverse=True) and set(automatic_budgets(loop, 1)) <= set(budgets)
        assert found.knee is not None and found.knee.step_ms is not None
        assert found.knee.step_ms <= 1.1 * loop.in_core_ms
        faster = [it for it in found.points if it.budget < found.knee.budget]
        assert all(it.step_ms is None or it.step_ms > 1.1 * loop.in_core_ms for it in faster)

    def test_a_card_without_room_is_one_of_the_budgets(self, trace: Trace) -> None:
        t4 = load_card("t4")
        loop = Loop(trace, t4)
        assert room_of(t4) not in automatic_budgets(loop, room_of(t4))  # 14 GiB: it fits
        assert 3 * GIB in automatic_budgets(loop, 3 * GIB)

    def test_the_bound_is_no_higher(self, loop: Loop) -> None:
        pytest.importorskip("scipy")
        from torch_uvm.cli.plan import _bound

        bound = _bound(loop)
        for point in make_plan([loop], [4 * GIB, 2 * GIB], bound).points:
            assert point.step_ms is not None and point.bound_ms is not None
            assert loop.in_core_ms * 0.999 <= point.bound_ms <= point.step_ms

    def test_the_faster_kind_of_update_is_taken(self, trace: Trace, deferred: Loop) -> None:
        card = load_card("h200")
        plain = Loop(trace, card)
        slower = 1.07 * plain.in_core_ms / deferred.whole.in_core_ms
        groups = [replace(it, us=slower * it.us) for it in deferred.trace.groups]
        loops = [plain, Loop(replace(deferred.trace, groups=groups), card)]
        found = make_plan(loops, [8 * GIB, GIB])
        for point in found.points:
            steps = {kind: it.point(point.budget).step_ms for kind, it in zip(KINDS, loops, strict=True)}
            assert None not in steps.values()
            assert point.optimizer == min(steps, key=lambda kind: steps[kind] or 0)
            assert point.step_ms == steps[point.optimizer]
        assert {it.optimizer for it in found.points} == set(KINDS)

    def test_advice_says_where_the_default_is_slower(self, trace: Trace, deferred: Loop) -> None:
        found = make_plan([Loop(trace, load_card("h200")), deferred], [8 * GIB, GIB])
        points = tuple(replace(it, optimizer=KINDS[0]) for it in found.points)
        assert points[0].into + points[0].out == 0 < points[1].into
        said = advice(replace(found, points=points), knows_deferred=True, is_estimate=False)
        assert any(it.startswith('optimizer="in_place" is faster at 1.00 GiB.') for it in said)


class TestDeferred:
    def test_what_is_derived_is_like_what_was_recorded(self, trace: Trace, deferred: Loop) -> None:
        made = derived(trace)
        assert made is not None
        card = load_card("h200")
        loops = Loop(made, card), deferred
        assert abs(len(loops[0].whole.operators) - len(loops[1].whole.operators)) <= 1
        for budget in (3 * GIB, GIB):
            steps = [it.point(budget).step_ms or 0 for it in loops]
            assert steps[0] == pytest.approx(steps[1], rel=0.05)
            assert steps[0] < (Loop(trace, card).point(budget).step_ms or 0)

    def test_the_iteration_takes_as_long_in_core(self, trace: Trace, loop: Loop) -> None:
        made = derived(trace)
        assert made is not None
        found = Loop(made, load_card("h200"))
        assert found.whole.in_core_ms == pytest.approx(loop.whole.in_core_ms, rel=0.02)
        assert found.in_core_ms == pytest.approx(loop.in_core_ms, rel=0.1)  # of other iterations of the host

    def test_only_fused_optimizers(self, tmp_path: Path) -> None:
        path = tmp_path / "run.trace"
        path.write_bytes(lzma.decompress((TRACES / "CNN.jsonl.xz").read_bytes()))
        assert derived(read_trace(path)) is None


class TestRates:
    """What a prediction takes into account beside an idle link."""

    def step_ms(self, trace: Trace, budget: int, rates: LinkRates, host_ms: float = 0.0) -> float:
        return TracedLoop(trace).predicted(budget, host_ms, rates).ms

    def test_without_transfers_nothing_is_slower(self, trace: Trace) -> None:
        card = load_card("h200")
        steps = [self.step_ms(trace, 100 * GIB, rates=of(card)) for of in (link_rates, rates_of_engine)]
        assert steps[0] == pytest.approx(steps[1])

    @pytest.mark.parametrize("part", [4, 2, 1])
    def test_the_engine_reaches_less_than_an_idle_link(self, trace: Trace, part: int) -> None:
        card = load_card("h200")
        steps = [self.step_ms(trace, part * GIB, rates=of(card)) for of in (link_rates, rates_of_engine)]
        assert steps[0] < steps[1] < 2 * steps[0]

    def test_a_slower_link_takes_longer(self, trace: Trace) -> None:
        cards = map(load_card, ("gh200", "h200", "t4"))
        steps = [self.step_ms(trace, GIB, rates=rates_of_engine(card)) for card in cards]
        assert steps == sorted(steps) and steps[2] > 2 * steps[1]

    def test_the_host_counts_if_it_takes_longer(self, trace: Trace) -> None:
        rates = rates_of_engine(load_card("h200"))
        assert self.step_ms(trace, 2 * GIB, host_ms=10_000, rates=rates) == pytest.approx(10_000, rel=0.01)
        assert self.step_ms(trace, 2 * GIB, host_ms=1, rates=rates) < 1_000


def test_a_batch_that_each_step_makes_while_it_has_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    head = {"format": "torch_uvm accesses", "version": 3, "units": {"time": "us", "size": "bytes"}}
    lines: list[dict[str, Any]] = [head | {"budgets": [None]}]
    for storage in (1, 2):  # a weight, and the first batch
        lines.append({"storage": storage, "device": 0, "bytes": 50 << 20, "resident": True})
    for step in range(8):
        operators = [("forward", [1, step + 2], []), ("middle", [1], []), ("update", [], [1])]
        for number, (name, reads, writes) in enumerate(operators):
            times = {"time": 3 * step + number, "in_place_ok": False}
            lines.append({"operator": name} | times | {"reads": reads, "writes": writes})
            if name == "update":
                lines.append({"birth": step + 3, "device": 0, "bytes": 50 << 20})
                lines.append({"death": step + 2})
            lines.append({"ran": 3 * step + number, "operators": 1, "us": 1000})
        lines.append({"step": "end"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(path)
    assert Loop(trace, load_card("h200")).point(200 << 20).step_ms == pytest.approx(3)


class TestCommand:
    def test_it_prints_a_plan(
        self, trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "plan.json"
        argv = ["--from", str(trace_file), "--budgets", "4GiB,2GiB", "--json", str(file)]
        said, _ = plan(argv, capsys)
        assert "peak          5.05 GiB without a budget; a step takes 26.1 ms" in said
        assert "fits          yes" in said and "optimizer state" in said
        record = json.loads(file.read_text())
        assert record["format"] == "torch_uvm plan" and record["version"] == 2 and record["smallest"] is None
        (found,) = record["plans"]
        assert [it["budget"] for it in found["points"]] == [4 * GIB, 2 * GIB]
        assert found["fits"] and found["missing_bytes"] == 0
        for it in found["points"]:
            assert f"{it['step_ms']:.1f}" in said

    def test_without_scipy(
        self, trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "scipy", None)
        for name in [it for it in sys.modules if it.startswith("scipy.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "torch_uvm._tools.lower_bound", raising=False)
        said, _ = plan(["--from", str(trace_file), "--budgets", "4GiB"], capsys)
        assert "no bound: it needs scipy, which is not installed: pip install scipy" in said
