"""The residency benchmark: the guard, arguments, plan, table, goals and written results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import _residency_columns as columns  # noqa: E402
import _residency_goals as goals  # noqa: E402
import _residency_plan as plan  # noqa: E402
import _residency_table as table  # noqa: E402
import bench_residency  # noqa: E402
from _bench_rows import LITTLE, engine, in_core, row  # noqa: E402
from _results import one_row_a_line, rounded, write_results  # noqa: E402
from _runs import GIB, LIMIT, MARGIN, MOST_BUDGET  # noqa: E402
from _workloads import NotHere  # noqa: E402

from torch_uvm import _C  # noqa: E402


class TestGuard:
    def test_nothing_is_started_without_room(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(_C, "in_use", lambda: False)
        monkeypatch.setattr(bench_residency, "free_by_nvml", lambda: [LIMIT + MARGIN - 1])
        monkeypatch.setattr(bench_residency, "NVML", {"NVML": lambda: [LIMIT + MARGIN - 1]})
        monkeypatch.setattr(bench_residency, "Bench", None)
        with pytest.raises(SystemExit, match="not safe to run: .* at least 14.0 GiB"):
            bench_residency.main(["--json", str(tmp_path / "x.json")])
        assert not list(tmp_path.iterdir())

    def test_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_residency, "free_by_nvml", lambda: None)
        with pytest.raises(SystemExit, match="needs a GPU"):
            bench_residency.main([])

    def test_managed_columns_refuse_too_large_a_budget(self) -> None:
        column = columns.Engine(torch.device("emu"), MOST_BUDGET + 1, None)
        try:
            with pytest.raises(NotHere, match="at most 7.5 GiB"):
                column.start()
        finally:
            column.guard.release()

    def test_managed_columns_need_a_runtime(self) -> None:
        with pytest.raises(NotHere, match="no runtime for meta"):
            columns.Engine(torch.device("meta"), GIB, None).start()


class TestArguments:
    @pytest.mark.parametrize("argument", ["--seconds=0", "--timeout=-1", "--steps=0", "--warm-up=0"])
    def test_less_than_one_is_refused(self, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            bench_residency.parse_arguments([argument])
        assert "accepted: at least 1" in capsys.readouterr().err

    def test_a_name_that_no_column_has(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            bench_residency.parse_arguments(["--only", "nothing of this name"])
        assert "no column has 'nothing of this name'" in capsys.readouterr().err

    def test_what_is_no_expression(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            bench_residency.parse_arguments(["--only", "LoRA", "--only", "("])
        assert "--only is '(', which is no regular expression" in capsys.readouterr().err

    def test_list_names_the_columns(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench_residency.main(["--list", "--only", "LoRA: engine, 1/2"]) == 0
        assert capsys.readouterr().out.split("\n")[:2] == ["LoRA: in core", "LoRA: engine, 1/2"]


class TestPlan:
    def test_names_are_unique(self) -> None:
        names = [(planned.workload, planned.name) for planned in plan.PLAN]
        assert len(names) == len(set(names))

    def test_columns_come_after_those_they_need(self) -> None:
        for place, planned in enumerate(plan.PLAN):
            before = {(other.workload, other.column) for other in plan.PLAN[:place] if not other.budget}
            assert {(planned.workload, column) for column in planned.needs()} <= before

    def test_selecting_includes_needed_columns(self) -> None:
        found = plan.select(plan.PLAN, ["2k tokens: engine, as FSDP2"])
        assert [planned.name for planned in found] == ["in core", "FSDP2 offload", "engine, as FSDP2 offload"]

    def test_selecting_by_several_expressions(self) -> None:
        found = plan.select(plan.PLAN, ["^64k.*: CPU", "^decoding: .*1.5"])
        names = [f"{planned.workload}: {planned.name}" for planned in found]
        assert names == [
            "64k tokens, checkpointing: in core",
            "64k tokens, checkpointing: CPUOffloadOptimizer",
            "decoding: in core",
            "decoding: engine, 1/1.5",
        ]

    @pytest.mark.parametrize(
        ("budget", "gib"),
        [("1/1.5", 2.0), ("1/4", 0.75), ("fits", 3.9), ("as peer", 4 / 1.07)],
    )
    def test_budgets(self, budget: str, gib: float) -> None:
        rows = [in_core(), row("peer", max_reserved=4 * GIB)]
        found = plan.Planned(LITTLE, "engine", budget).bytes(rows, None)
        assert found is not None
        assert found % (2 * plan.MIB) == 0
        assert 0 <= gib * GIB - found < 2 * plan.MIB + 1

    def test_budgets_stay_below_the_limit_of_managed_memory(self) -> None:
        much = [in_core() | {"max_allocated": 16 * GIB, "max_reserved": 20 * GIB}]
        for budget in ("1/1.5", "1/2", "fits"):
            with pytest.raises(plan.Unresolved):
                plan.Planned(LITTLE, "engine", budget).bytes(much, None)
        assert plan.Planned(LITTLE, "engine", "as in core").bytes(much, None) == MOST_BUDGET

    def test_failed_rows_give_no_budget(self) -> None:
        failed = [in_core() | {"status": "failed: OutOfMemoryError"}]
        with pytest.raises(plan.Unresolved, match="no peak is known of '2k tokens', in core"):
            plan.Planned(LITTLE, "engine", "1/2").bytes(failed, None)


class TestTable:
    def test_in_core(self) -> None:
        plain = in_core()
        table.derive(plain, [plain])
        assert plain["over_in_core"] == 1
        assert plain["outside_bytes"] == GIB
        assert table.equality(plain) == "repeat"

    def test_engine(self) -> None:
        plain, managed = in_core(), engine()
        table.derive(plain, [plain])
        table.derive(managed, [plain, managed])
        assert managed["over_in_core"] == 1.5
        assert "bound" not in managed  # there is no trace
        assert managed["over_budget"] == pytest.approx(0.1)  # 3.2 GiB less 1 GiB outside, for 2 GiB
        cells = table.line(managed).split()
        assert cells[2:] == ("2.00 150.0 1.50 - - 0.90 3.20 +10.0% 5.20 2.60 1.04 2.0 0 equal".split())
        assert len(table.heading()) == len(table.line(managed))

    def test_bound_by_a_trace(self, tmp_path: Path) -> None:
        """Two storages alternate in a budget for one of them. Each step takes the link's time for both."""
        pytest.importorskip("scipy")
        storage = {"device": 0, "bytes": 5_540_000_000}
        header = {"format": "torch_uvm accesses", "version": 3, "budgets": [None]}
        lines: list[dict[str, Any]] = [header | {"units": {"time": "us", "size": "bytes"}}]
        lines += [{"storage": name} | storage | {"resident": name == 1} for name in (1, 2)]
        use = {"operator": "aten::sum", "time": 0.0, "in_place_ok": False}
        for _ in range(4):
            lines += [use | {"reads": [name], "writes": []} for name in (1, 2)] + [{"step": "end"}]
        trace = tmp_path / "a.trace"
        trace.write_text("".join(json.dumps(each) + "\n" for each in lines))
        managed = engine(budget=5_540_000_000)
        table.derive(managed, [in_core()], trace)
        assert managed["bound"]["bound_ms"] == pytest.approx(200)
        assert managed["over_bound"] == pytest.approx(0.75)
        deferred = engine(budget=5_540_000_000) | {"column": "engine, deferred"}
        table.derive(deferred, [in_core()], trace)
        assert "bound" not in deferred

    def test_a_trace_that_cannot_be_read(self, tmp_path: Path) -> None:
        pytest.importorskip("scipy")
        managed = engine()
        table.derive(managed, [in_core()], tmp_path / "none.trace")
        assert "FileNotFoundError" in managed["bound_error"]

    @pytest.mark.parametrize(
        ("losses", "plain", "said"),
        [
            (["0x1p+0"], {"repeatable": True}, "equal"),
            (["0x1p+0"], {"repeatable": True, "not_deterministic": True}, "equal"),
            (["0x1p+0", "0x1.8p-1"], {"repeatable": True}, "NO"),
            (["0x1p+0", "0x1.8p-1"], {"repeatable": True, "not_deterministic": True}, "(plain differs)"),
            (["0x1p+0", "0x1.8p-1"], {"repeatable": False}, "(plain differs)"),
        ],
    )
    def test_losses(self, losses: list[str], plain: dict[str, bool], said: str) -> None:
        managed = engine(losses=losses)
        table.derive(managed, [in_core() | plain])
        assert table.equality(managed) == said

    def test_a_row_that_did_not_run_says_why(self) -> None:
        failed = {"status": "hung: killed after 90 s", "budget": 2 * GIB}
        managed = row("engine", "1/2") | failed
        table.derive(managed, [in_core(), managed])
        assert table.line(managed).split(maxsplit=3)[2:] == ["2.00", "hung: killed after 90 s"]


class TestGoals:
    def of(self, rows: list[dict[str, Any]]) -> dict[str, goals.Goal]:
        for each in rows:
            table.derive(each, rows)
        return {goal.name: goal for goal in goals.goals(rows)}

    def test_without_rows_no_goal_is_reached(self) -> None:
        assert {goal.reached for goal in goals.goals([])} == {None}
        assert "not measured" in goals.goals([])[0].line()

    def test_against_peers_that_need_as_much(self) -> None:
        peer = row("FSDP2 offload", step_ms=300.0, losses=["0x1p+0"])
        slim = engine(step_ms=250.0, driver_bytes=2 * GIB) | {"planned_budget": "1/4"}
        rows = [in_core(), engine(), slim, peer | {"driver_bytes": int(3.2 * GIB)}]
        found = self.of(rows)[f"FSDP2 offload / engine at no more peak, {LITTLE}"]
        assert (found.value, found.reached) == (2.0, True)
        rows[-1] = peer | {"driver_bytes": 3 * GIB}  # the engine's faster row needs more memory
        found = self.of(rows)[f"FSDP2 offload / engine at no more peak, {LITTLE}"]
        assert (found.value, found.reached) == (1.2, False)

    def test_worst_of_rows(self) -> None:
        found = self.of([in_core(), engine(), engine(step_ms=240.0) | {"name": "the slow one"}])
        assert found["every other row: step / bound (the most)"].reached is None  # no trace
        assert found["first step / a planned step (the most)"].value == 6
        assert found["device memory over the budget (the most)"].reached is False

    def test_different_losses_are_counted(self) -> None:
        name = "rows of the engine with other losses"
        assert self.of([in_core(), engine()])[name].reached is True
        assert self.of([in_core(), engine(), engine(losses=["0x1p+1"])])[name].value == 1


class TestWrittenResults:
    def test_a_row_is_a_line(self) -> None:
        rows = [{"name": "a", "times": [1, 2], "counts": {"fetched": 3}}, {"name": "b" * 1000}]
        text = one_row_a_line({"environment": {"cores": 2}, "rows": rows})
        assert text.splitlines() == [
            "{",
            ' "environment": {"cores": 2},',
            ' "rows": [',
            f"  {json.dumps(rows[0])},",
            f"  {json.dumps(rows[1])}",
            " ]",
            "}",
        ]

    def test_numbers_have_six_digits(self) -> None:
        assert rounded({"a": [1.23456789, 1e12 / 7], "b": 12345678}) == {
            "a": [1.23457, 142857000000.0],
            "b": 12345678,
        }

    def test_stored_results_have_the_written_format(self, tmp_path: Path) -> None:
        kept = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
        assert kept
        for path in kept:
            write_results(tmp_path / path.name, json.loads(path.read_text()))
            assert (tmp_path / path.name).read_text() == path.read_text(), path.name
