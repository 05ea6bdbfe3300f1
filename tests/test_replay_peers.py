"""The benchmark that replays logs on other allocators: its parts that need no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _spawn import Spawn

from torch_uvm._tools.allocation_logs import HEADER, read_log

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from _replay_peers import Column, columns_of, table  # noqa: E402

MIB = 1 << 20


class TestTable:
    def test_medians(self) -> None:
        """100 calls, 10 of them in the last iteration."""
        it = Column("caching", calls=100, last_iteration_calls=10, peak_live=10 * MIB, peak_reserved=40 * MIB)
        it.seconds, it.last_iteration_seconds = [1e-9, 5e-6, 1.0], [7e-8]
        assert it.figures()["ns_per_call"] == pytest.approx(50)
        heads, row = table([it], {})
        assert heads.split()[0] == "allocator"
        assert row.split() == "caching 50 7 40.00 MiB 300.0 % 0 0".split()

    def test_failed_and_skipped_columns(self) -> None:
        failed = Column("rmm-arena", failure="no room\nin detail")
        _, *lines = (line.split(maxsplit=1) for line in table([failed], {"rmm-pool": "it is not installed"}))
        assert lines == [["rmm-arena", "failed: no room"], ["rmm-pool", "not run: it is not installed"]]
        assert "ns_per_call" not in failed.figures()


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
