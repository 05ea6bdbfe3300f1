"""benchmarks/bench_schedules.py: its rows, and what it takes from measured results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAYER = ROOT / "build" / "cpp" / "play_accesses"


def row(workload: str, part: str) -> dict[str, str]:
    if not PLAYER.exists():
        pytest.skip("play_accesses is not built")
    script = ROOT / "benchmarks" / "bench_schedules.py"
    command = [sys.executable, str(script), "--only", workload, "--parts", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    head, figures, last = done.stdout.splitlines()
    assert figures.startswith(workload) and last.startswith("predicted / bound: mean ")
    names = ["part", "in core", "in place", "deferred", "bound", "ratio", "measured", "planned", "cpu ms"]
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
    assert float(seen["bound"]) <= float(seen["planned"]) <= float(seen["in place"])
