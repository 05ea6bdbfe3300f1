"""The benchmark that replays logs on other allocators: its parts that need no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _spawn import Spawn

from torch_uvm._tools.allocation_logs import HEADER, read_log

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from _replay_peers_logs import columns_of  # noqa: E402
from _replay_peers_table import Column, table, verdict_lines, verdicts  # noqa: E402

MIB = 1 << 20


def column(name: str, nanoseconds: float, peak: int, in_the_last: float = 10) -> Column:
    """100 calls, 10 of them in the last iteration."""
    return Column(
        name,
        name,
        calls=100,
        last_iteration_calls=10,
        peak_live=10 * MIB,
        peak_reserved=peak * MIB,
        seconds=[[100 * nanoseconds * 1e-9, 1.0], [1e-9]],
        last_iteration_seconds=[[10 * in_the_last * 1e-9]],
    )


class TestTable:
    def test_medians_and_minima_of_all_rounds(self) -> None:
        it = column("caching", 50, 40, in_the_last=7)
        assert it.ns_per_call == pytest.approx(50) and it.last_iteration_ns_per_call == pytest.approx(7)
        assert it.least == pytest.approx((0.01, 7))
        assert it.figures()["ns_per_call"] == pytest.approx(50)
        heads, row = table([it], {})
        assert heads.split()[0] == "allocator"
        assert row.split() == "caching 50 7 0 7 40.00 MiB 300.0 % 0 0".split()

    def test_failed_and_skipped_columns(self) -> None:
        failed = Column("rmm-arena", "rmm-arena", failure="no room\nin detail")
        lines = table([column("torch", 1, 20), failed], {"rmm-pool": "it is not installed"})
        assert lines[2:] == ["rmm-arena  failed: no room", "rmm-pool   not run: it is not installed"]
        assert "ns_per_call" not in failed.figures()


class TestVerdicts:
    OURS = (column("caching", 50, 40, 9), column("small", 60, 28, 20), column("arena", 5, 170, 1))

    def test_only_columns_with_no_higher_peak_count(self) -> None:
        in_all, in_last = verdicts(self.OURS, [column("torch", 300, 40, 90)])
        assert (in_all["best_of_ours"], in_all["its_ns"]) == ("caching", pytest.approx(50))
        assert in_last["best_of_ours"] == "caching" and in_all["its_peak_is_no_higher"]
        (line, _) = verdict_lines([in_all, in_last])
        assert "against torch" in line and "6.00 times as fast (caching)" in line and "HIGHER" not in line

    def test_reports_that_no_column_has_a_lower_peak(self) -> None:
        found = verdicts(self.OURS, [column("rmm-pool", 30, 12)])
        assert [it["best_of_ours"] for it in found] == ["small", "small"]
        assert not found[0]["its_peak_is_no_higher"]
        assert "0.50 times as fast (small), WITH A HIGHER PEAK: 28.00 MiB" in verdict_lines(found)[0]

    def test_failed_columns_are_ignored(self) -> None:
        failed = Column("rmm-pool", "rmm-pool", failure="no room")
        assert verdicts(self.OURS, [failed]) == []
        assert verdicts([failed], [column("torch", 1, 1)]) == []


class TestLogs:
    @staticmethod
    def log(path: Path, *rows: str) -> Path:
        path.write_text(
            "".join(f"{line}\n" for line in [HEADER, *(f"1,00:00:00.000000,{it}" for it in rows)])
        )
        return path

    def test_marks_lie_where_iterations_begin_and_end(self, tmp_path: Path) -> None:
        rows = ["allocate,0x10,8,0", "allocate failure,(nil),9,0"]
        rows += ["allocate,0x20,4,0", "free,0x20,4,0"] * 4
        (kinds, allocations, sizes, count), how = columns_of(read_log(self.log(tmp_path / "log.csv", *rows)))
        assert kinds == [0, *[2, 0, 1, 3] * 4] and how.startswith("4 of 2 rows")
        assert count == 5 and sizes[:3] == [8, 0, 4] and allocations[2:4] == [1, 1]

    def test_other_streams_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="device 0's default one"):
            columns_of(read_log(self.log(tmp_path / "log.csv", "allocate,0x10,8,0x77")))


def test_names_missing_requirements(spawn: Spawn) -> None:
    script = [str(ROOT / "benchmarks" / "bench_replay_peers.py")]
    done = spawn(args=script, env={"CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 1 and "needs a GPU" in done.stderr and "Traceback" not in done.stderr
    done = spawn(args=script, env={"PYTORCH_ALLOC_CONF": "backend:native"}, check=False)
    assert done.returncode == 1 and "PYTORCH_ALLOC_CONF is set" in done.stderr
