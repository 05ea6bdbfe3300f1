"""The residency benchmarks at a small scale: columns in processes of their own, and the emulated table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from _spawn import Spawn

import torch_uvm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_residency  # noqa: E402
import bench_residency_emulated as emulated  # noqa: E402


def test_columns_run_and_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs two columns of a few MiB in child processes. Checks the rows, the table and the file."""
    target = tmp_path / "rows.json"
    arguments = ["--rehearse", "--only", "CNN: save_on_cpu", "--steps=2", "--warm-up=1", "--ahead=2"]
    assert bench_residency.main([*arguments, "--json", str(target)]) == 0
    plain, saved = json.loads(target.read_text())["rows"]
    assert (plain["column"], saved["column"]) == ("in core", "save_on_cpu")
    assert plain["repeatable"] is True and plain["not_deterministic"] is False
    assert len(plain["losses"]) == 3
    assert plain["losses"] == saved["losses"]
    assert len(set(plain["losses"])) == 3  # the model learns
    assert saved["over_in_core"] == saved["step_ms"] / plain["step_ms"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "CNN:"
    assert printed[3].endswith("equal")

    # Resumes without time for another column: earlier rows stay, with the commit of their run.
    resumed = tmp_path / "resumed.json"
    again = ["--rehearse", "--only", "CNN: ", "--seconds=1", "--resume", str(target), "--json", str(resumed)]
    assert bench_residency.main(again) == 0
    capsys.readouterr()
    by_name = {row["name"]: row for row in json.loads(resumed.read_text())["rows"]}
    assert {"commit", "date"} <= by_name["in core"].keys()
    assert by_name["save_on_cpu"]["losses"] == saved["losses"]
    assert by_name["engine, 1/2"]["status"] == "not run: no time left"


def test_calls_of_compiled_graphs(spawn: Spawn) -> None:
    """The part of compiled_steps.py that needs no GPU. On a smaller machine its figures say nothing."""
    script = str(ROOT / "benchmarks" / "compiled_steps.py")
    done = spawn(args=[script, "--calls", "--json", "out.json"], env={"TORCH_UVM_DEVICE": "emu"})
    found = json.loads((spawn.folder / "out.json").read_text())["rows"]
    columns = ["plain", "no budget", "watched", "idle"]
    assert [(row["column"], row["inputs"]) for row in found] == [
        (column, inputs) for inputs in (10, 100, 300) for column in columns
    ]
    assert all(row["us"] > 0 for row in found)
    assert done.stdout.splitlines()[-4].split() == ["inputs", "plain", "no", "budget", "watched", "idle"]


def test_a_row_has_what_a_plan_predicts(tmp_path: Path) -> None:
    """By a trace of its own process, once its budget is lifted."""
    target = tmp_path / "rows.json"
    arguments = ["--rehearse", "--only", "^2k tokens: engine, deferred, 1/2$", "--steps=3", "--warm-up=6"]
    assert bench_residency.main([*arguments, "--json", str(target)]) == 0
    plain, row = json.loads(target.read_text())["rows"]
    assert "predicted" not in plain
    found = row["predicted"]
    assert found["note"] == ""
    assert 0 < found["traced_ms"] <= found["step_ms"]
    assert found["in_core_ms"] > 0
    assert row["steps"] == len(row["steps_ms"]) == 3 and row["calm"] in (0, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "no report of this benchmark"),
        ("{", "Expecting"),
        ('{"environment": {"torch": "1.0", "rehearsal": true}, "rows": []}', "torch 1.0"),
        ('{"environment": {"device": "another"}, "rows": []}', "device another"),
    ],
)
def test_files_that_cannot_be_resumed_are_refused(tmp_path: Path, text: str, why: str) -> None:
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
        assert engine.evicted == 0  # within its budget the driver moves nothing
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
