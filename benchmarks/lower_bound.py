"""The lower bound of a step's time within a budget, for every policy.

    python benchmarks/lower_bound.py TRACE --budget 4GiB [--step-ms 153] [--intervals 64] [--json FILE]

It reads a trace with the operators' durations (docs/annex.md). `torch_uvm/_tools/lower_bound.py` says what
the bound takes into account.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_uvm import _C
from torch_uvm._tools import lower_bound
from torch_uvm._tools.cards import LinkRates
from torch_uvm.traces import read_trace


def bound(
    path: Path,
    budget: int,
    step_ms: float | None = None,
    rates: LinkRates | None = None,
    intervals: int = 64,
) -> dict[str, float]:
    """`lower_bound.bound` of the trace in a file.

    Raises:
        ValueError, RuntimeError: as there, or it is no trace.
        OSError: it cannot be read.
    """
    return lower_bound.bound(read_trace(path), budget, step_ms, rates, intervals)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="A lower bound of a step's time within a budget.", allow_abbrev=False
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budget", type=_C.parse_bytes, required=True, help="such as 4GiB")
    parser.add_argument("--step-ms", type=float, help="a step in core")
    parser.add_argument("--intervals", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    try:
        result = bound(arguments.trace, arguments.budget, arguments.step_ms, intervals=arguments.intervals)
    except (OSError, ValueError) as error:
        parser.error(f"{arguments.trace}: {error}")
    for key, value in result.items():
        print(f"{key:<14}{value:,.3f}" if key.endswith("ms") else f"{key:<14}{value:,.0f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
