"""Compares dry runs with the H200's traces: the step in core, and the peak.

    python benchmarks/bench_dry_runs.py [--only TEXT] [--json FILE]

Each workload of benchmarks/traces/index.json runs dry with the H200's card and that host; needs no GPU. What
was measured is `step_ms` and `peak_bytes` of the index.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from torch_uvm._tools.card_files import load_card
from torch_uvm._tools.dry_runs import dry_run

HERE = Path(__file__).parent
HOST_US = 8  # of the host of the traces


def main() -> int:
    parser = argparse.ArgumentParser(description="Dry runs beside measurements.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--keep", type=Path, help="keep the traces in this folder")
    arguments = parser.parse_args()
    index = json.loads((HERE / "traces" / "index.json").read_text())
    rows = []
    card = replace(load_card("h200"), host_us=HOST_US)
    for name, measured in index.items():
        if arguments.only not in name:
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            if arguments.keep is not None:
                folder = arguments.keep / name.replace(", ", "_").replace(" ", "_")
                folder.mkdir(parents=True, exist_ok=True)
            found = dry_run([str(HERE / "_dry_workload.py"), name], card=card, folder=folder)
        row = {
            "workload": name,
            "step_ms": found.step_ms,
            "measured_step_ms": measured["in_place"]["step_ms"],
            "peak_bytes": found.step_peak_bytes,
            "measured_peak_bytes": measured["in_place"]["peak_bytes"],
            "seconds": time.perf_counter() - begin,
        }
        rows.append(row)
        print(
            f"{name:40} step {row['step_ms']:8.2f} of {row['measured_step_ms']:8.2f} ms "
            f"{row['step_ms'] / row['measured_step_ms'] - 1:+7.1%}  "
            f"peak {row['peak_bytes'] / row['measured_peak_bytes'] - 1:+7.2%}  {row['seconds']:.0f} s",
            flush=True,
        )
    for what in ("step_ms", "peak_bytes"):
        errors = [abs(it[what] / it[f"measured_{what}"] - 1) for it in rows]
        print(f"{what}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
