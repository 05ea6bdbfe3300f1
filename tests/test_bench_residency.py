"""What of the residency benchmarks can be checked without a GPU."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_uvm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import _residency_columns as columns  # noqa: E402
import _residency_goals as goals  # noqa: E402
import _residency_plan as plan  # noqa: E402
import _residency_processes as processes  # noqa: E402
import _residency_table as table  # noqa: E402
import bench_residency  # noqa: E402
import bench_residency_emulated as emulated  # noqa: E402
from _residency_limits import GIB, LIMIT, MOST_BUDGET, ROOM  # noqa: E402
from _residency_sampler import Reading, Sampler  # noqa: E402
from _residency_workloads import NotHere, Workload  # noqa: E402
from _results import one_row_a_line, write_results  # noqa: E402

LITTLE = "2k tokens"


def row(column: str = "in core", part: str = "", **figures: Any) -> dict[str, Any]:
    common = {"workload": LITTLE, "column": column, "name": f"{column}, {part}", "planned_budget": part}
    return common | {"status": "ok", "spike": False} | figures


def in_core() -> dict[str, Any]:
    return row(
        step_ms=100.0,
        wall_ms=101.0,
        first_ms=500.0,
        forward_ms=30.0,
        backward_ms=60.0,
        losses=["0x1p+0", "0x1p-1"],
        repeatable=True,
        driver_before=GIB,
        driver_peak=6 * GIB,
        max_reserved=4 * GIB,
        max_allocated=3 * GIB,
    )


def traffic(into: float, out: float, place: float) -> dict[str, Any]:
    moved = {"fetched": into, "written_back": out, "used_in_place": place, "waited": 0.0}
    counts = {name: {"count": 1.0, "bytes": each, "ms": 2.0} for name, each in moved.items()}
    return counts | {"plan_hits": 10.0, "plan_misses": 0.0}


def engine(**figures: Any) -> dict[str, Any]:
    usual = {
        "step_ms": 150.0,
        "wall_ms": 151.0,
        "first_ms": 900.0,
        "losses": ["0x1p+0", "0x1p-1"],
        "budget": 2 * GIB,
        "driver_before": GIB,
        "driver_peak": int(4.2 * GIB),
        "native_reserved": 0,
        "statistics": traffic(5.2e9, 2.6e9, 1.04e9),
    }
    return row("engine", "1/2", **(usual | figures))


class TestArguments:
    @pytest.mark.parametrize("argument", ["--seconds=0", "--timeout=-1", "--steps=0", "--ahead=0"])
    def test_less_than_one_is_refused(self, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            bench_residency.parse_arguments([argument])
        assert "accepted: at least 1" in capsys.readouterr().err

    def test_a_name_that_no_column_has(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            bench_residency.parse_arguments(["--only", "nothing of this name"])
        assert "no column has 'nothing of this name'" in capsys.readouterr().err

    def test_list_says_what_would_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench_residency.main(["--list", "--only", "LoRA: engine, 1/2"]) == 0
        assert capsys.readouterr().out.split("\n")[:2] == ["LoRA: in core", "LoRA: engine, 1/2"]


class TestPlan:
    def test_names_are_unique(self) -> None:
        names = [(planned.workload, planned.name) for planned in plan.PLAN]
        assert len(names) == len(set(names))

    def test_what_a_column_needs_comes_before_it(self) -> None:
        for place, planned in enumerate(plan.PLAN):
            before = {(other.workload, other.column) for other in plan.PLAN[:place] if not other.budget}
            assert {(planned.workload, column) for column in planned.needs()} <= before

    def test_selecting_brings_what_is_needed(self) -> None:
        found = plan.select(plan.PLAN, "2k tokens: engine, as FSDP2")
        assert [planned.name for planned in found] == ["in core", "FSDP2 offload", "engine, as FSDP2 offload"]

    @pytest.mark.parametrize(
        ("budget", "gib"),
        [("1/1.5", 2.0), ("1/4", 0.75), ("fits", 3.9), ("1.1x", 3.3), ("7.4GiB", 7.4), ("as peer", 4 / 1.07)],
    )
    def test_budgets(self, budget: str, gib: float) -> None:
        rows = [in_core(), row("peer", max_reserved=4 * GIB)]
        found = plan.budget_bytes(plan.Planned(LITTLE, "engine", budget), rows, None)
        assert found is not None
        assert found % (2 * plan.MIB) == 0
        assert 0 <= gib * GIB - found < 2 * plan.MIB + 1

    def test_no_budget_is_more_than_may_be_managed(self) -> None:
        much = [in_core() | {"max_allocated": 16 * GIB, "max_reserved": 20 * GIB}]
        for budget in ("1/1.5", "1/2", "fits", "7.6GiB", "1.1x"):
            with pytest.raises(plan.Unresolved):
                plan.budget_bytes(plan.Planned(LITTLE, "engine", budget), much, None)
        assert plan.budget_bytes(plan.Planned(LITTLE, "engine", "as in core"), much, None) == MOST_BUDGET

    def test_what_failed_gives_no_budget(self) -> None:
        failed = [in_core() | {"status": "failed: OutOfMemoryError"}]
        with pytest.raises(plan.Unresolved, match="nobody knows the peak of '2k tokens', in core"):
            plan.budget_bytes(plan.Planned(LITTLE, "engine", "1/2"), failed, None)


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
        assert managed["floor_ms"] == pytest.approx(120)  # 6.24 GB in at 52 GB/s
        assert managed["over_floor"] == pytest.approx(1.25)
        assert managed["driver_bytes"] == int(4.2 * GIB) - GIB
        assert managed["over_budget"] == pytest.approx(0.1)  # 3.2 GiB less 1 GiB outside, for 2 GiB
        cells = table.line(managed).split()
        assert cells[2:] == (
            "2.00 150.0 151.0 1.50 120.0* 1.25 0.90 3.20 +10.0% 5.20 2.60 1.04 2.0 0 equal".split()
        )
        assert len(table.heading()) == len(table.line(managed))

    def test_floor_by_a_trace(self, tmp_path: Path) -> None:
        """Two storages take turns in a budget that has one of them: both come in, in each step."""
        storage = {"device": 0, "bytes": 5_200_000_000}
        lines: list[dict[str, Any]] = [{"format": "torch_uvm accesses", "version": 1}]
        lines += [storage | {"storage": name, "resident": name == 1} for name in (1, 2)]
        use = {"operator": "aten::sum", "time": 0.0, "in_place_ok": False, "writes": []}
        for _ in range(4):
            lines += [use | {"reads": [1]}, use | {"reads": [2]}, {"step": 1}]
        trace = tmp_path / "a.trace"
        trace.write_text("\n".join(map(json.dumps, lines)))
        managed = engine(budget=5_200_000_000)
        table.derive(managed, [in_core()], trace)
        assert managed["floor_kind"] == "least bytes, by phases"
        assert managed["least"]["fetched"] == 10_400_000_000
        assert managed["floor_ms"] == pytest.approx(30 + 200)
        assert "*" not in table.line(managed)

    def test_a_trace_that_cannot_be_read(self, tmp_path: Path) -> None:
        managed = engine()
        table.derive(managed, [in_core()], tmp_path / "none.trace")
        assert managed["floor_kind"] == "bytes moved"
        assert "FileNotFoundError" in managed["floor_error"]

    @pytest.mark.parametrize(
        ("losses", "repeatable", "said"),
        [
            (["0x1p+0"], True, "equal"),
            (["0x1p+0", "0x1.8p-1"], True, "NO"),
            (["0x1p+0", "0x1.8p-1"], False, "(plain differs)"),
        ],
    )
    def test_losses(self, losses: list[str], repeatable: bool, said: str) -> None:
        managed = engine(losses=losses)
        table.derive(managed, [in_core() | {"repeatable": repeatable}])
        assert table.equality(managed) == said

    def test_a_row_that_did_not_run_says_why(self) -> None:
        failed = {"status": "hung: killed after 90 s", "budget": 2 * GIB}
        managed = row("engine", "1/2") | failed
        table.derive(managed, [in_core(), managed])
        assert table.line(managed).split(maxsplit=3)[2:] == ["2.00", "hung: killed after 90 s"]
        calls = row("engine") | {"workload": "rates", "status": "not run: no time left"}
        assert table.call_lines(calls)[0].endswith("not run: no time left")


class TestGoals:
    def of(self, rows: list[dict[str, Any]]) -> dict[str, goals.Goal]:
        for each in rows:
            table.derive(each, rows)
        return {goal.name: goal for goal in goals.goals(rows)}

    def test_nothing_measured_is_nothing_reached(self) -> None:
        assert {goal.reached for goal in goals.goals([])} == {None}
        assert "not measured" in goals.goals([])[0].line()

    def test_against_peers_that_need_as_much(self) -> None:
        peer = row("FSDP2 offload", step_ms=300.0, losses=["0x1p+0"], driver_before=GIB)
        slim = engine(step_ms=250.0, driver_peak=3 * GIB) | {"planned_budget": "1/4"}
        rows = [in_core(), engine(), slim, peer | {"driver_peak": int(4.2 * GIB)}]
        found = self.of(rows)[f"FSDP2 offload / engine at no more peak, {LITTLE}"]
        assert (found.value, found.reached) == (2.0, True)
        rows[-1] = peer | {"driver_peak": 4 * GIB}  # the engine's faster row needs more
        found = self.of(rows)[f"FSDP2 offload / engine at no more peak, {LITTLE}"]
        assert (found.value, found.reached) == (1.2, False)

    def test_worst_of_rows(self) -> None:
        found = self.of([in_core(), engine(), engine(step_ms=240.0) | {"name": "the slow one"}])
        floor = found["every other row: step / floor (the most)"]
        assert floor.value == pytest.approx(2.0)
        assert floor.reached is False
        assert floor.where == f"{LITTLE}, the slow one"
        assert found["first step / a planned step (the most)"].value == 6
        assert found["device memory over the budget (the most)"].reached is False

    def test_other_losses_are_counted(self) -> None:
        name = "rows of the engine with other losses"
        assert self.of([in_core(), engine()])[name].reached is True
        assert self.of([in_core(), engine(), engine(losses=["0x1p+1"])])[name].value == 1

    def test_costs_of_operators(self) -> None:
        shapes = [(100, 1000, 400.0), (1000, 1000, 500.0), (100, 10_000, 900.0)]
        figures = [{"live": n, "operators": m, "cost_ns": cost} for n, m, cost in shapes]
        found = self.of([row("engine", workload="operators", figures=figures)])
        assert found["engine cost of an operator, CPU-bound step, us (the most)"].value == 0.9
        assert found["... as live grows tenfold, us more (the most)"].value == pytest.approx(0.1)
        assert found["... as operators grows tenfold, us more (the most)"].value == pytest.approx(0.5)


class TestGuard:
    def test_too_little_room_is_refused(self) -> None:
        assert bench_residency.check_room(lambda: Reading(0, ROOM * LIMIT)) == ROOM * LIMIT
        with pytest.raises(bench_residency.Refused, match="128.0 GiB"):
            bench_residency.check_room(lambda: Reading(0, ROOM * LIMIT - 1))

    def test_nothing_is_started_without_room(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(bench_residency, "any_reader", lambda: ("a test", lambda: Reading(0, GIB)))
        monkeypatch.setattr(bench_residency, "Bench", None)
        with pytest.raises(SystemExit, match="not safe to run: the card has 1.0 GiB free"):
            bench_residency.main(["--json", str(tmp_path / "x.json")])
        assert not list(tmp_path.iterdir())

    def test_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_residency, "any_reader", lambda: None)
        with pytest.raises(SystemExit, match="needs a GPU"):
            bench_residency.main([])

    def test_children_start_with_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_UVM", "1")
        monkeypatch.setenv("TORCH_UVM_CONF", "limit:none")
        ours, others = (processes.environment(False, ours) for ours in (True, False))
        assert ours["TORCH_UVM_CONF"] == f"limit:{LIMIT}"
        assert "TORCH_UVM" not in ours
        assert not any(key.startswith("TORCH_UVM") for key in others)

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

    def test_paged_state_is_worked_out_before(self) -> None:
        model = nn.Linear(MOST_BUDGET // 8, 1, bias=False, device="meta")
        model.bias = nn.Parameter(torch.empty(1, device="meta"))
        workload = Workload(model, (), lambda model, batch: batch[0], torch.optim.AdamW)
        with pytest.raises(NotHere, match="its state would take 7.5 GiB"):
            columns.PagedAdamW(torch.device("meta"), None, None).make_optimizer(workload)


class TestProcesses:
    """How a column's process ends, whatever it does."""

    @pytest.mark.parametrize(
        ("program", "said"),
        [
            ("", ""),
            ("raise ValueError('of its own')", "failed with status 1: ValueError: of its own"),
            ("import os; os.abort()", "died of SIGABRT"),
            ("import threading; threading.Event().wait()", "hung: killed after 1 s"),
        ],
    )
    def test_ends(self, program: str, said: str, tmp_path: Path) -> None:
        script = tmp_path / "child.py"
        script.write_text(
            f"import pathlib, sys\npathlib.Path(sys.argv[1]).touch()\nsys.stdin.readline()\n{program}\n"
        )
        variables = processes.environment(True, False)
        child = processes.Child(tmp_path / "log", variables, tmp_path / "ready", script)
        child.wait_ready(60)
        child.tell({})
        found = child.wait(1 if "hung" in said else 60)
        assert (found or "").startswith(said)
        assert bool(found) == bool(said)
        child.end()

    def test_one_that_is_not_needed_ends_by_itself(self, tmp_path: Path) -> None:
        child = processes.Child(tmp_path / "log", processes.environment(True, False), tmp_path / "ready")
        child.wait_ready(60)
        child.end()
        assert (tmp_path / "ready").exists()


class TestSampler:
    def test_peak_within_a_time(self) -> None:
        sampler = Sampler(lambda: Reading(0, 0))
        sampler._samples = [(1.0, 5), (2.0, 9), (3.0, 7)]
        assert sampler.peak(0, 10) == 9
        assert sampler.peak(2.5, 3) == 7
        assert sampler.peak(3.5, 10) is None

    def test_samples_while_it_is_open(self) -> None:
        came = iter(range(1, 10**9))
        enough = threading.Event()

        def read() -> Reading:
            used = next(came)
            if used > 20:
                enough.set()
            return Reading(used, 0)

        with Sampler(read, period=0.001) as sampler:
            assert enough.wait(60)
        assert (sampler.peak(0, float("inf")) or 0) >= 20
        assert sampler.settle(10**9)
        assert not sampler.settle(0, tolerance=0, seconds=0)


def test_columns_run_and_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two columns in processes of their own, in a few MiB: the rows, the table and the file."""
    target = tmp_path / "rows.json"
    arguments = ["--rehearse", "--only", "CNN: save_on_cpu", "--steps=2", "--warm-up=1", "--ahead=2"]
    assert bench_residency.main([*arguments, "--json", str(target)]) == 0
    plain, saved = json.loads(target.read_text())["rows"]
    assert (plain["column"], saved["column"]) == ("in core", "save_on_cpu")
    assert plain["repeatable"] is True
    assert len(plain["losses"]) == 3
    assert plain["losses"] == saved["losses"]
    assert len(set(plain["losses"])) == 3  # it learns
    assert saved["over_in_core"] == saved["step_ms"] / plain["step_ms"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "CNN:"
    assert printed[3].endswith("equal")

    # Resumed with no time for any column: those that ran are there, with the commit they ran at.
    resumed = tmp_path / "resumed.json"
    again = ["--rehearse", "--only", "CNN: ", "--seconds=1", "--resume", str(target), "--json", str(resumed)]
    assert bench_residency.main(again) == 0
    capsys.readouterr()
    by_name = {row["name"]: row for row in json.loads(resumed.read_text())["rows"]}
    assert {"commit", "date"} <= by_name["in core"].keys()
    assert by_name["save_on_cpu"]["losses"] == saved["losses"]
    assert by_name["engine, 1/2"]["status"] == "not run: no time left"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "no report of this benchmark"),
        ("{", "Expecting"),
        ('{"environment": {"torch": "1.0", "rehearsal": true}, "rows": []}', "torch 1.0"),
        ('{"environment": {"device": "another"}, "rows": []}', "device another"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(SystemExit, match=why):
        bench_residency.main(["--rehearse", "--resume", str(tmp_path / "file.json")])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[emulated.Row]:
    engine = hasattr(torch_uvm, "set_budget")
    return emulated.rows(["1/2"], engine=engine, folder=str(tmp_path_factory.mktemp("traces")))


class TestEmulated:
    def test_parts_are_whole_pages(self) -> None:
        assert emulated.part_of(100 * emulated.MIB, "1/1.5") == 66 * emulated.MIB

    def test_rows_of_the_driver(self, rows: list[emulated.Row]) -> None:
        plain, driver = rows[:2]
        assert (plain.bytes_in, plain.bytes_out, plain.faults) == (0, 0, 0)
        assert plain.peak_allocated > driver.memory >= driver.peak_resident
        assert driver.equal
        assert driver.bytes_in > driver.memory / 4
        assert driver.evicted > 0
        assert driver.modelled_ms > plain.modelled_ms
        assert len(plain.losses) == emulated.WARM_UP + emulated.STEPS
        assert "driver's faults, 1/2" in emulated.format_rows([plain, driver])

    def test_a_run_that_fails_says_why(self) -> None:
        with pytest.raises(RuntimeError, match="accepted: at least 1048576 bytes"):
            emulated.run("small", "1", 1, None)

    @pytest.mark.skipif(not hasattr(torch_uvm, "set_budget"), reason="this torch_uvm has no budget")
    def test_rows_of_the_engine(self, rows: list[emulated.Row]) -> None:
        _, driver, engine, auto = rows
        assert engine.equal
        assert engine.peak_resident <= engine.memory
        assert engine.evicted == 0  # within its budget the driver has nothing to do
        assert engine.bytes_in + engine.in_place < driver.bytes_in
        assert engine.misses == 0
        assert engine.hits
        assert auto.equal
        assert auto.after_spike_ms is not None
        assert auto.after_spike_ms <= 1.05 * auto.modelled_ms
        assert engine.least_in is not None
        assert 0 < engine.least_in <= engine.bytes_in + engine.in_place
        assert engine.trace is not None
        assert Path(engine.trace).stat().st_size > 0


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

    def test_results_that_are_kept_are_as_they_would_be_written(self, tmp_path: Path) -> None:
        kept = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
        assert kept
        for path in kept:
            write_results(tmp_path / path.name, json.loads(path.read_text()))
            assert (tmp_path / path.name).read_text() == path.read_text(), path.name
