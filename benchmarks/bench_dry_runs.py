"""Compares dry runs with the H200's traces: the step in core, and the peak.

    python benchmarks/bench_dry_runs.py [--only TEXT]

Each workload of benchmarks/traces/index.json runs dry with the H200's card and that host; needs no GPU. What
was measured is `step_ms` and `peak_bytes` of the index.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from torch_uvm._tools.cards import load_card
from torch_uvm._tools.dry_runs import dry_run

HERE = Path(__file__).parent
HOST_US = 8  # of the host of the traces


def main() -> None:
    parser = argparse.ArgumentParser(description="Dry runs beside measurements.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    arguments = parser.parse_args()
    card = replace(load_card("h200"), host_us=HOST_US)
    errors: dict[str, list[float]] = {"step": [], "peak": []}
    for name, traces in json.loads((HERE / "traces" / "index.json").read_text()).items():
        if arguments.only not in name:
            continue
        begin, measured = time.perf_counter(), traces["in_place"]
        with tempfile.TemporaryDirectory() as folder:
            found = dry_run([str(HERE / "_workloads.py"), name], cards=[card], folder=Path(folder))
        step = found.step_ms / measured["step_ms"] - 1
        peak = found.step_peak_bytes / measured["peak_bytes"] - 1
        errors["step"].append(abs(step))
        errors["peak"].append(abs(peak))
        print(
            f"{name:40} step {found.step_ms:8.2f} of {measured['step_ms']:8.2f} ms {step:+7.1%}  "
            f"peak {peak:+7.2%}  {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    for what, each in errors.items():
        print(f"{what}: median error {statistics.median(each):.1%}, worst {max(each):.1%}")


if __name__ == "__main__":
    main()
