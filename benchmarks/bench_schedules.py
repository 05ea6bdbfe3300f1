"""Steps within a budget, predicted on any machine, beside their lower bound.

    python benchmarks/bench_schedules.py [--only TEXT] [--parts 1.5,2,4]

Each workload's trace (benchmarks/traces, timed on an H200 by record_traces.py) is played through the engine
and the allocator in modelled time, with updates in place, as recorded. The bound is lower_bound.py's: for
every policy, deferred updates included. Both at peak / PART, in multiples of the step in core.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lower_bound import bound

FOLDER = Path(__file__).resolve().parent
PLAYER = FOLDER.parent / "build" / "cpp" / "play_accesses"


def played_ms(trace: Path, budget: int, step_ms: float) -> float:
    """The mean of the last of thirty steps.

    Raises:
        RuntimeError: it cannot be played under this budget.
    """
    command = [str(PLAYER), str(trace), "--budget", str(budget), "--step-ms", str(step_ms)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.splitlines()[-1].split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted steps and their bounds.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--parts", default="1.5,2,4", help="of the peak")
    arguments = parser.parse_args()
    if not PLAYER.exists():
        parser.error(f"{PLAYER} is not there; make cpp builds it")
    parts = [float(part) for part in arguments.parts.split(",")]
    print(
        f"{'workload':40}{'part':>6}{'in core ms':>12}{'predicted':>11}{'bound':>8}{'ratio':>8}{'took s':>8}"
    )
    ratios = []
    for workload, row in json.loads((FOLDER / "traces" / "index.json").read_text()).items():
        if arguments.only in workload:
            ratios += rows(workload, row, parts)
    if ratios:
        print(f"predicted / bound: mean {statistics.mean(ratios):.2f}, worst {max(ratios):.2f}")
    return 0


def rows(workload: str, row: dict[str, object], parts: Sequence[float]) -> list[float]:
    """Prints the workload's rows. Returns predicted / bound of each that has both."""
    ratios = []
    step_ms, peak = float(str(row["step_ms"])), int(str(row["peak_bytes"]))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        trace.write_bytes(lzma.decompress((FOLDER / "traces" / str(row["file"])).read_bytes()))
        for part in parts:
            start = f"{workload:40}{part:>6g}{step_ms:>12.1f}"
            began = time.perf_counter()
            try:
                least = bound(trace, int(peak / part), step_ms)["bound_ms"]
                took = time.perf_counter() - began
                played = played_ms(trace, int(peak / part), step_ms)
            except (RuntimeError, ValueError) as reason:
                print(f"{start}  {reason}")
                continue
            ratios.append(played / least)
            predicted, lowest = played / step_ms, least / step_ms
            print(f"{start}{predicted:>11.2f}{lowest:>8.2f}{ratios[-1]:>8.2f}{took:>8.1f}", flush=True)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
