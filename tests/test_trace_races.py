"""Traces of real programs, played under a detector of races (benchmarks/cpp/race_detector.h).

The engine orders all its work, and every operator reads the bytes that were written last.

The traces were recorded on an H200. They are played in modelled time, with the engine's own decisions for
each budget; the detector does not depend on how long work takes. `make test` plays those of FIRST.
"""

from __future__ import annotations

import json
import lzma
import subprocess
from pathlib import Path
from typing import Any

import pytest

from torch_uvm._tools.timed_iteration import iteration_of
from torch_uvm.traces import read_trace

TRACES = Path(__file__).parent.parent / "benchmarks" / "traces"
FIRST = {
    "CNN, in_place",
    "decoding, in_place",
    "graph network, in_place",
    "language model, optimizer in backward, deferred",
    "2k tokens, deferred",
}
KINDS = [
    pytest.param(
        kinds["in_place"],
        traced,
        id=f"{workload}, {kind}",
        marks=() if f"{workload}, {kind}" in FIRST else pytest.mark.nightly,
    )
    for workload, kinds in json.loads((TRACES / "index.json").read_text()).items()
    for kind, traced in kinds.items()
]


@pytest.mark.parametrize(("in_core", "traced"), KINDS)
def test_traces(
    in_core: dict[str, Any], traced: dict[str, Any], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    player = pytestconfig.getoption("--cpp-build").resolve() / "play_accesses"
    if not player.exists():
        pytest.skip("play_accesses is not built")
    trace = tmp_path / "trace"
    trace.write_bytes(lzma.decompress((TRACES / traced["file"]).read_bytes()))
    budgets = ",".join(str(int(in_core["peak_bytes"] / part)) for part in (1.2, 1.5, 2, 3, 4))
    operators = len(iteration_of(read_trace(trace), in_core["step_ms"]).floats)
    for streams in (1, 3):
        command = [player, trace, "--budget", budgets, "--step-ms", str(in_core["step_ms"])]
        command += ["--iteration", str(operators), "--repeat", "30"]
        command += ["--races", "yes", "--streams", str(streams)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
