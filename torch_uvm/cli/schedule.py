"""`python -m torch_uvm schedule`: what would cross the link in a recorded loop, and how long a step takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch_uvm import _C
from torch_uvm._tools.access_traces import read_trace
from torch_uvm._tools.predictions import Prediction, predict
from torch_uvm._tools.schedules import Schedule, schedule_of
from torch_uvm._util.escaping import printable
from torch_uvm.cli.progress import Progress

SUMMARY = "predict a recorded loop within a budget"


def said(schedule: Schedule, found: Prediction) -> str:
    """The schedule and its prediction in words."""
    slower = found.step_ms / schedule.in_core_ms
    return (
        f"{schedule}\npredicted: {found.step_ms:.2f} ms, {slower:.2f} times in core; operators wait "
        f"{found.wait_ms['operands']:.2f} ms for operands and {found.wait_ms['room']:.2f} ms for room; "
        f"at most {_C.format_bytes(found.peak_bytes)} of storages on the device"
    )


def main(argv: Sequence[str]) -> int:
    """Reads a trace, prints its schedule within a budget, and writes it to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_uvm schedule",
        description="Makes the schedule that the residency engine follows in a recorded loop, under any "
        "budget. Needs no device.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="written by torch_uvm.tools.record_accesses"
    )
    parser.add_argument("--budget", metavar="BYTES", required=True, help="such as 4GiB")
    parser.add_argument(
        "--step-ms",
        metavar="MS",
        type=float,
        help="a measured step in core, where the trace has no durations",
    )
    parser.add_argument("--transfers", action="store_true", help="a line for each transfer")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write the schedule; `plot` draws such a file"
    )
    arguments = parser.parse_args(argv)
    reading = Progress(f"reading {printable(arguments.trace.name)}")
    try:
        budget = _C.parse_bytes(arguments.budget)
        trace = read_trace(arguments.trace, reading)
        schedule = schedule_of(trace, budget, arguments.step_ms)
        found = predict(schedule)
        reading.close()
        print(said(schedule, found))
        for line in schedule.lines() if arguments.transfers else ():
            print(line)
        if arguments.output is not None:
            schedule.save(arguments.output)
    except (OSError, ValueError) as error:
        reading.close()
        parser.error(printable(error))
    return 0
