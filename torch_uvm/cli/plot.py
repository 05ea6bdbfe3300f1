"""`python -m torch_uvm tools plot`: memory and link over the time of a trace, drawn as in a report."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_uvm._tools.access_traces import Trace, read_trace
from torch_uvm._util.escaping import printable
from torch_uvm._util.files import output_argument
from torch_uvm.cli.progress import Progress
from torch_uvm.report.charts import pictures
from torch_uvm.report.page import document
from torch_uvm.report.samples import Sample, thinned

SUMMARY = "draw a trace of accesses"

_TOTALS = {"fetch": "fetched", "write_back": "written_back", "in_place": "used_in_place"}


def _changes(trace: Trace, device: int) -> Iterator[tuple[float, str, float]]:
    """Times in us, and what changes then: the level of "live" or "resident" bytes, or the sum of a total."""
    sizes = {name: it.bytes for name, it in trace.storages.items() if it.device == device}
    made = {name for op in trace.operators for name in op.births}
    live = sum(size for name, size in sizes.items() if name not in made)
    yield trace.begin_us, "live", live
    for op in trace.operators:
        live += sum(sizes.get(name, 0) for name in op.births)
        yield op.time_us, "live", live
        live -= sum(sizes.get(name, 0) for name in op.deaths)
    for level in trace.resident:
        if level.device == device:
            yield trace.time_of(level.operators), "resident", level.bytes
    sums: dict[str, float] = defaultdict(float)
    for it in trace.transfers:
        if it.kind in _TOTALS and it.storage in sizes:
            for figure, change in (("bytes", it.bytes), ("ms", (it.took_us or 0.0) / 1e3)):
                total = f"{_TOTALS[it.kind]}.{figure}"
                sums[total] += change
                yield it.time_us, total, sums[total]


def samples_of(trace: Trace, device: int) -> list[Sample]:
    """What a report samples of a run: bytes on the device, and as host bytes those that are elsewhere."""
    found: list[Sample] = []
    now: dict[str, float] = {"live": 0, "resident": 0}
    for time_us, what, value in sorted(_changes(trace, device), key=lambda it: it[0]):
        now[what] = value
        seconds, resident = (time_us - trace.begin_us) / 1e6, int(now["resident"])
        elsewhere = max(int(now["live"]) - resident, 0)
        totals = {name: total for name, total in now.items() if "." in name}
        found.append(Sample(seconds, host=elsewhere, resident={0: resident}, totals=totals))
    return thinned(found)


def _page(path: Path, device: int) -> str:
    with Progress(f"reading {printable(path.name)}") as reading:
        trace = read_trace(path, reading)
    devices = sorted({it.device for it in trace.storages.values()})
    if device not in devices:
        raise ValueError(f"the trace has nothing of device {device}; it has {devices}")
    budget = trace.budgets[device] if device < len(trace.budgets) else None
    steps = [(trace.time_of(it) - trace.begin_us) / 1e6 for it in trace.steps[:12]]
    name = {0: f"device {device}, {len(trace.operators)} operators, {len(trace.transfers)} transfers"}
    budgets = {} if budget is None else {0: budget}
    return document(path.name, pictures(samples_of(trace, device), steps, name, budgets))


def main(argv: Sequence[str]) -> int:
    """Reads a trace, and writes a page with its pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_uvm tools plot", description=SUMMARY, allow_abbrev=False
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="of torch_uvm.tools.record_accesses")
    parser.add_argument(
        "-o", "--output", metavar="PAGE", type=output_argument, required=True, help="such as step.html"
    )
    parser.add_argument("--device", type=int, default=0, help="0 unless told")
    arguments = parser.parse_args(argv)
    try:
        arguments.output.write_text(_page(arguments.trace, arguments.device), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(printable(error))
    return 0
