"""benchmarks/bench_schedules.py and bench_plans.py: their rows, and what is taken from measured results."""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _traced_schedules import schedule_of

from torch_uvm._tools.timed_iteration import iteration_of
from torch_uvm.traces import read_trace

ROOT = Path(__file__).resolve().parent.parent
PLAYER = ROOT / "build" / "cpp" / "play_accesses"


def row(workload: str, part: str) -> dict[str, str]:
    if not PLAYER.exists():
        pytest.skip("play_accesses is not built")
    script = ROOT / "benchmarks" / "bench_schedules.py"
    command = [sys.executable, str(script), "--only", workload, "--parts", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    head, figures, of_bound, in_room = done.stdout.splitlines()
    assert figures.startswith(workload) and of_bound.startswith("predicted / bound: mean ")
    assert in_room.startswith("planned / in room: mean ")
    names = ["part", "in core", "in place", "deferred", "bound", "ratio", "measured", "planned", "in room"]
    names.append("cpu ms")
    assert head.split() == " ".join(["workload", *names]).split()
    return dict(zip(names, figures.removeprefix(workload).split(), strict=True))


def test_a_row_without_measurements() -> None:
    seen = row("graph network", "1.6")
    assert seen["measured"] == "-"
    faster = min(float(seen["in place"]), float(seen["deferred"]))
    assert float(seen["ratio"]) == pytest.approx(faster / float(seen["bound"]), abs=0.02)
    assert float(seen["planned"]) >= 1 and float(seen["bound"]) >= 1


def test_a_row_with_measurements() -> None:
    seen = row("CNN", "2")
    assert 1 < float(seen["measured"]) < 10
    assert float(seen["bound"]) < float(seen["in room"])  # 1/21 of the budget is not for storages
    assert float(seen["in room"]) <= float(seen["planned"]) <= float(seen["in place"])


def test_little_is_fetched_that_no_schedule_evicts(tmp_path: Path) -> None:
    """A large result finds free memory in pieces, between storages that are on their way to the host."""
    if not PLAYER.exists():
        pytest.skip("play_accesses is not built")
    folder = ROOT / "benchmarks" / "traces"
    kinds = json.loads((folder / "index.json").read_text())["vision transformer"]
    step_ms, budget = kinds["in_place"]["step_ms"], int(kinds["in_place"]["peak_bytes"] / 1.5)
    path = tmp_path / "trace"
    path.write_bytes(lzma.decompress((folder / kinds["deferred"]["file"]).read_bytes()))
    trace = read_trace(path)
    command = [str(PLAYER), str(path), "--budget", str(budget), "--step-ms", str(step_ms)]
    command += ["--iteration", str(len(iteration_of(trace, step_ms).floats))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    head, figures = done.stdout.splitlines()
    assert head.split()[:2] == ["budget", "fetched"]
    fetched = float(figures.split()[1])
    schedule = schedule_of(trace, budget, step_ms)
    assert 0.98 < fetched / (schedule.bytes_of("fetch") / schedule.steps / 2**20) < 1.04


def test_a_row_of_a_program_that_was_run_dry() -> None:
    script = str(ROOT / "benchmarks" / "bench_plans.py")
    command = [sys.executable, script, "--only", "unet", "--parts", "67"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    head, figures, of_plan, of_schedule = done.stdout.splitlines()
    assert head.split()[-3:] == ["predicted", "scheduled", "bound"]
    name, peak, _core, part, predicted, scheduled, least = figures.split()
    assert (name, part) == ("unet", "67%") and float(peak) > 5
    assert 1 <= float(least) <= float(scheduled) <= float(predicted)
    for line, what in ((of_plan, predicted), (of_schedule, scheduled)):
        mean, worst = re.findall(r"[\d.]+", line)
        assert mean == worst, "there is one row"
        assert float(mean) == pytest.approx(float(what) / float(least), abs=0.02)  # all three are rounded
