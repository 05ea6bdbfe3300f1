"""What address ranges lose to their granularity, computed from recorded traces on any machine.

    python benchmarks/range_rounding.py [--least 8MiB]

With `segments:stable` storages of at least LEAST take whole pages of 2 MiB. A row has the live bytes of a
workload at its peak, and by how much rounding such storages up enlarges them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from pathlib import Path

import numpy as np

from torch_uvm import _C
from torch_uvm._tools.budget_checks import live_bytes
from torch_uvm._tools.timed_iteration import Iteration, iteration_of
from torch_uvm.traces import read_trace

TRACES = Path(__file__).resolve().parent / "traces"
PAGE = 2 << 20  # bytes


def rounding(iteration: Iteration, least: int) -> tuple[float, float]:
    """The live bytes at the peak, and what rounding adds there."""
    exact = live_bytes(iteration)
    peak = int(np.argmax(exact))
    for value in iteration.values:
        if value.bytes >= least:
            value.bytes = -(-value.bytes // PAGE) * PAGE
    return float(exact[peak]), float(live_bytes(iteration)[peak] - exact[peak])


def main() -> None:
    parser = argparse.ArgumentParser(description="What address ranges lose to their granularity.")
    parser.add_argument("--least", default=8 << 20, type=_C.parse_bytes, help="such as 8MiB, the default")
    least = parser.parse_args().least
    print(f"{'workload':40}{'live, MiB':>12}{'added':>10}")
    for workload, traces in json.loads((TRACES / "index.json").read_text()).items():
        recorded = traces["in_place"]
        with tempfile.NamedTemporaryFile() as file:
            file.write(lzma.decompress((TRACES / recorded["file"]).read_bytes()))
            file.flush()
            iteration = iteration_of(read_trace(file.name), recorded["step_ms"])
        exact, added = rounding(iteration, least)
        print(f"{workload:40}{exact / 2**20:>12.0f}{added / exact:>10.2%}", flush=True)


if __name__ == "__main__":
    main()
