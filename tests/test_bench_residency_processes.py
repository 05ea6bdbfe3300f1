"""Processes of the residency benchmarks: the guard, failing and ending children, the sampler."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import _host_speed  # noqa: E402
import _residency_columns as columns  # noqa: E402
import _residency_processes as processes  # noqa: E402
import bench_residency  # noqa: E402
from _residency_limits import GIB, LIMIT, MARGIN, MOST_BUDGET  # noqa: E402
from _residency_sampler import Reading, Sampler  # noqa: E402
from _residency_workloads import NotHere, Workload  # noqa: E402


class TestGuard:
    def test_too_little_room_is_refused(self) -> None:
        assert bench_residency.check_room(lambda: Reading(0, LIMIT + MARGIN)) == LIMIT + MARGIN
        with pytest.raises(bench_residency.Refused, match="at least 14.0 GiB"):
            bench_residency.check_room(lambda: Reading(0, LIMIT + MARGIN - 1))

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
    """Every way to end of a column's process is reported."""

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

    def test_an_unneeded_process_exits_by_itself(self, tmp_path: Path) -> None:
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

    def test_no_samples_while_steps_are_timed(self) -> None:
        asked: list[bool] = []
        asked_before: list[int] = []
        came = threading.Event()

        def is_quiet() -> bool:
            asked.append(len(asked) < 20)
            return asked[-1]

        def read() -> Reading:
            asked_before.append(len(asked))
            came.set()
            return Reading(7, 0)

        with Sampler(read, period=0.001, is_quiet=is_quiet) as sampler:
            assert came.wait(60)
        assert asked_before[0] == 21
        assert sampler.peak(0, float("inf")) == 7


class TestHostSpeed:
    def test_cores_of_the_main_thread_and_of_autograd(self) -> None:
        assert _host_speed.busy_cores() <= os.sched_getaffinity(0)
        assert len(_host_speed.busy_cores()) >= 1

    def test_a_loop_runs_on_its_core_and_leaves_the_thread_where_it_was(self) -> None:
        before = os.sched_getaffinity(0)
        assert _host_speed.loop_ms(min(before)) > 0
        assert os.sched_getaffinity(0) == before

    @pytest.mark.parametrize(("after", "calm"), [(1.1, True), (1.9, False)])
    def test_calm_is_full_speed_before_and_after(
        self, after: float, calm: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        took = iter([*([1.0] * _host_speed.PROBES), 1.05, after, 1.9, 1.0])
        monkeypatch.setattr(_host_speed, "busy_cores", lambda: {0})
        monkeypatch.setattr(_host_speed, "loop_ms", lambda core: next(took))
        host = _host_speed.HostSpeed()
        with host.watch() as watched:
            assert not watched.calm
        assert watched.calm is calm
        with host.watch() as watched:
            pass
        assert not watched.calm
