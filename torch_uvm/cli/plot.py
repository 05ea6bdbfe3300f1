"""`python -m torch_uvm plot`: residency and link use over time, as a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from torch_uvm.cli.progress import Busy, Progress
from torch_uvm.printable import printable
from torch_uvm.traces import Trace, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY = "draw a trace of accesses: residency and link use"

_GIB = 1 << 30
_LIVE, _RESIDENT, _BUDGET = "#c9d7e8", "#2a6f97", "#c1121f"
_LANES = {
    "fetch": ("in", "#2a6f97"),
    "write_back": ("out", "#bc6c25"),
    "in_place": ("used in place", "#606c38"),
}
_BINS = 400  # of link use, over the width of the picture


def live_bytes(trace: Trace, device: int) -> tuple[list[float], list[int]]:
    """Bytes of the storages of a device that are alive, wherever they are.

    Returns:
        microseconds since the beginning, and the bytes from then on
    """
    born = {storage for op in trace.operators for storage in op.births}
    sizes = {name: it.bytes for name, it in trace.storages.items() if it.device == device}
    level = sum(size for name, size in sizes.items() if name not in born)
    times, levels = [0.0], [level]
    for op in trace.operators:
        level += sum(sizes.get(name, 0) for name in op.births)
        times.append(op.time_us - trace.begin_us)
        levels.append(level)
        level -= sum(sizes.get(name, 0) for name in op.deaths)
    return times, levels


def resident_bytes(trace: Trace, device: int) -> tuple[list[float], list[int]]:
    """Bytes on a device as they were recorded; empty if they were not."""
    points = [it for it in trace.resident if it.device == device]
    return [trace.time_of(it.operators) - trace.begin_us for it in points], [it.bytes for it in points]


def link_rates(trace: Trace, device: int, bins: int = _BINS) -> tuple[float, dict[str, list[float]]]:
    """Bytes a second that were asked to cross the link, by kind of transfer.

    Returns:
        a bin's width in microseconds, and for each kind that is drawn its rate in each of ``bins``
    """
    end = max(
        [it.time_us for it in trace.operators[-1:]] + [it.time_us for it in trace.transfers], default=0.0
    )
    width = max(end - trace.begin_us, 1.0) / bins
    moved = {kind: [0.0] * bins for kind in _LANES}
    for it in trace.transfers:
        if it.kind in moved and trace.storages[it.storage].device == device:
            moved[it.kind][min(int((it.time_us - trace.begin_us) / width), bins - 1)] += it.bytes
    return width, {kind: [each / width * 1e6 for each in series] for kind, series in moved.items()}


def _draw_residency(axes: Axes, trace: Trace, device: int) -> None:
    times, live = live_bytes(trace, device)
    milliseconds = [each / 1e3 for each in times]
    axes.fill_between(
        milliseconds, [each / _GIB for each in live], step="post", color=_LIVE, label="alive, wherever it is"
    )
    times, resident = resident_bytes(trace, device)
    if resident:
        axes.fill_between(
            [each / 1e3 for each in times],
            [each / _GIB for each in resident],
            step="post",
            color=_RESIDENT,
            label="resident on the device",
        )
    budget = trace.budgets[device] if device < len(trace.budgets) else None
    if budget is not None:
        axes.axhline(budget / _GIB, color=_BUDGET, linewidth=1.5, label=f"budget, {budget / _GIB:.2f} GiB")
    for step in trace.steps:
        axes.axvline((trace.time_of(step) - trace.begin_us) / 1e3, color="#999999", linewidth=0.8)
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)


def _draw_link(axes: Axes, trace: Trace, device: int) -> None:
    width, rates = link_rates(trace, device)
    starts = list(accumulate([0.0] + [width / 1e3] * (_BINS - 1)))
    for kind, (label, color) in _LANES.items():
        sign = -1 if kind == "write_back" else 1
        axes.step(
            starts,
            [sign * each / 1e9 for each in rates[kind]],
            where="post",
            color=color,
            label=label,
            linewidth=1,
        )
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_ylabel("link, asked for\nGB/s, out below")
    axes.set_xlabel("ms")


def draw(trace: Trace, path: Path, device: int = 0) -> None:
    """Draws residency above and link use below, over the time at which the host ran the operators.

    Raises:
        ModuleNotFoundError: there is no matplotlib. OSError, ValueError: ``path`` cannot be written so.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_residency(above, trace, device)
    _draw_link(below, trace, device)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper right", fontsize=8, frameon=False)
    above.set_title(
        f"device {device}: {len(trace.operators)} operators, {len(trace.transfers)} transfers",
        fontsize=10,
        loc="left",
    )
    figure.savefig(path)


def main(argv: Sequence[str]) -> int:
    """Reads a trace and writes its picture."""
    parser = argparse.ArgumentParser(prog="python -m torch_uvm plot", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="written by torch_uvm.record_accesses")
    parser.add_argument(
        "-o", "--output", metavar="PICTURE", type=Path, required=True, help="such as step.png"
    )
    parser.add_argument("--device", type=int, default=0, help="0 unless told")
    arguments = parser.parse_args(argv)
    reading = Progress(f"reading {printable(arguments.trace.name)}")
    try:
        trace = read_trace(arguments.trace, reading)
    except (OSError, ValueError) as error:
        reading.close()
        parser.error(printable(error))
    reading.close()
    if not any(it.device == arguments.device for it in trace.storages.values()):
        devices = sorted({it.device for it in trace.storages.values()})
        parser.error(f"the trace has nothing of device {arguments.device}; it has {devices}")
    try:
        with Busy("drawing"):
            draw(trace, arguments.output, arguments.device)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        print("plot needs matplotlib, which is not installed: pip install matplotlib", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(printable(f"{arguments.output}: {error}"))
    return 0
