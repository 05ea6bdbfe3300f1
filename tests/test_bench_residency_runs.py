"""The residency benchmark at a small scale: columns in processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_residency  # noqa: E402


def test_columns_run_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs two columns of a few MiB in child processes, with the bits of their losses."""
    target = tmp_path / "rows.json"
    monkeypatch.setattr(bench_residency, "UNWRITTEN", ("what",))
    arguments = ["--rehearse", "--only", "CNN: save_on_cpu$", "--steps=2", "--warm-up=1"]
    assert bench_residency.main([*arguments, "--json", str(target)]) == 0
    plain, saved = json.loads(target.read_text())["rows"]
    assert (plain["column"], saved["column"]) == ("in core", "save_on_cpu")
    assert plain["repeatable"] is True and plain["not_deterministic"] is False
    assert plain["losses"] == saved["losses"] and saved["losses_equal"] is True
    assert len(set(plain["losses"])) == 3  # the model learns
    assert saved["over_in_core"] == pytest.approx(saved["step_ms"] / plain["step_ms"], rel=1e-4)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "CNN:"
    assert printed[3].endswith("equal")


def test_a_row_has_what_a_plan_predicts(tmp_path: Path) -> None:
    """By a trace of its own process, once its budget is lifted. In place, the trace has a bound, too."""
    target = tmp_path / "rows.json"
    arguments = ["--rehearse", "--only", "^2k tokens: engine(, deferred)?, 1/2$", "--steps=3", "--warm-up=6"]
    assert bench_residency.main([*arguments, "--json", str(target)]) == 0
    plain, *rows = json.loads(target.read_text())["rows"]
    assert "predicted" not in plain and "losses" not in plain
    for row in rows:
        found = row["predicted"]
        assert found["note"] == ""
        assert 0 < found["traced_ms"] <= found["step_ms"]
        assert found["in_core_ms"] > 0
        assert row["steps"] == 3 and row["spread"] >= 0
        assert row["statistics"]["plan_misses"] == 0 and row["statistics"]["plan_hits"] > 0
    assert [("bound" in row or "bound_error" in row) for row in rows] == [True, False]


def test_a_column_that_fails_and_one_without_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "rows.json"
    child = tmp_path / "child.py"
    child.write_text("raise ValueError('of its own')")
    monkeypatch.setattr(bench_residency, "CHILD", child)
    arguments = ["--rehearse", "--only", "CNN: save_on_cpu$", "--json", str(target)]
    assert bench_residency.main(arguments) == 1
    assert json.loads(target.read_text())["rows"][0]["status"] == "failed: ValueError: of its own"
    assert bench_residency.main([*arguments, "--seconds=1"]) == 0
    assert {row["status"] for row in json.loads(target.read_text())["rows"]} == {"not run: no time left"}
