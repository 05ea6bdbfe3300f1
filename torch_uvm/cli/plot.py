"""`python -m torch_uvm plot`: residency and link use over time, as a picture of a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from torch_uvm import _C
from torch_uvm._tools.access_traces import Trace, Transfer, read_trace
from torch_uvm._util.escaping import printable
from torch_uvm.cli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUMMARY = "draw a trace of accesses"

_BYTES = tuple(
    (float(1 << shift), name) for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "bytes"))
)
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "bytes/s"))
_LIVE, _RESIDENT, _BUDGET = "#c9d7e8", "#2a6f97", "#c1121f"
_LANES = {
    "fetch": ("in", "#2a6f97"),
    "write_back": ("out", "#bc6c25"),
    "in_place": ("used in place", "#606c38"),
}
_LARGE = 1 << 20  # bytes: events time smaller copies too coarsely
_BINS = 400  # of link use, over the width of the picture


def live_bytes(trace: Trace, device: int) -> tuple[list[float], list[int]]:
    """Bytes of the storages of a device that are live, wherever they are.

    Returns:
        times in microseconds since the beginning, and the bytes from each time on
    """
    created = {storage for op in trace.operators for storage in op.births}
    sizes = {name: it.bytes for name, it in trace.storages.items() if it.device == device}
    level = sum(size for name, size in sizes.items() if name not in created)
    times, levels = [0.0], [level]
    for op in trace.operators:
        level += sum(sizes.get(name, 0) for name in op.births)
        times.append(op.time_us - trace.begin_us)
        levels.append(level)
        level -= sum(sizes.get(name, 0) for name in op.deaths)
    return times, levels


def resident_bytes(trace: Trace, device: int) -> tuple[list[float], list[int]]:
    """Bytes on a device as recorded; empty if they were not recorded."""
    points = [it for it in trace.resident if it.device == device]
    return [trace.time_of(it.operators) - trace.begin_us for it in points], [it.bytes for it in points]


def crossings(trace: Trace, device: int) -> list[tuple[str, float, float, int]]:
    """Transfers on the link: kind, begin and end in microseconds since the beginning, and bytes.

    A direction of the link carries one transfer at a time. A transfer begins when it is requested, or when
    the one before ends, and lasts its measured duration. A transfer without one (a use in place) is taken to
    be as fast as the fastest copy. A trace of version 1 has no durations; begin and end are equal.
    """
    ours = [it for it in trace.transfers if it.kind in _LANES and trace.storages[it.storage].device == device]
    fastest = _fastest(ours)
    free = {"in": 0.0, "out": 0.0}
    found = []
    for it in ours:
        way = "out" if it.kind == "write_back" else "in"
        untimed = it.bytes / fastest if fastest else 0.0
        begin = max(it.time_us - trace.begin_us, free[way] if fastest else 0.0)
        free[way] = begin + (untimed if it.took_us is None else it.took_us)
        found.append((it.kind, begin, free[way], it.bytes))
    return found


def _fastest(transfers: Sequence[Transfer]) -> float:
    """Bytes per microsecond of the fastest copy; 0: none was measured."""
    measured = [(it.bytes, it.took_us) for it in transfers if it.took_us]
    if large := [count / took for count, took in measured if count >= _LARGE]:
        return max(large)
    return sum(count for count, _ in measured) / sum(took for _, took in measured) if measured else 0.0


def is_measured(trace: Trace) -> bool:
    """Whether the trace has the durations of copies."""
    return any(it.took_us for it in trace.transfers)


def link_rates(trace: Trace, device: int, bins: int = _BINS) -> tuple[float, dict[str, list[float]]]:
    """Bytes per second on the link, by kind of transfer (`crossings`).

    Returns:
        a bin's width in microseconds, and for each kind that is drawn its rate in each of ``bins``
    """
    crossed = crossings(trace, device)
    last = max([it.time_us for it in trace.operators[-1:]], default=trace.begin_us) - trace.begin_us
    width = max([last, 1.0, *(end for _, _, end, _ in crossed)]) / bins
    moved = {kind: [0.0] * bins for kind in _LANES}
    for kind, begin, end, count in crossed:
        first, final = (min(int(it / width), bins - 1) for it in (begin, end))
        for index in range(first, final + 1):
            within = min(end, (index + 1) * width) - max(begin, index * width)
            moved[kind][index] += count * within / (end - begin) if end > begin else count
    return width, {kind: [each / width * 1e6 for each in series] for kind, series in moved.items()}


def _unit(most: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which there is one, or the smallest."""
    return next((it for it in units if most >= it[0]), units[-1])


def _draw_residency(axes: Axes, trace: Trace, device: int) -> None:
    times, live = live_bytes(trace, device)
    budget = trace.budgets[device] if device < len(trace.budgets) else None
    unit, name = _unit(max([*live, budget or 0]), _BYTES)
    milliseconds = [each / 1e3 for each in times]
    axes.fill_between(
        milliseconds, [each / unit for each in live], step="post", color=_LIVE, label="alive, wherever it is"
    )
    times, resident = resident_bytes(trace, device)
    if resident:
        axes.fill_between(
            [each / 1e3 for each in times],
            [each / unit for each in resident],
            step="post",
            color=_RESIDENT,
            label="resident on the device",
        )
    if budget is not None:
        label = f"budget, {_C.format_bytes(budget)}"
        axes.axhline(budget / unit, color=_BUDGET, linewidth=1.5, label=label)
    for step in trace.steps:
        axes.axvline((trace.time_of(step) - trace.begin_us) / 1e3, color="#999999", linewidth=0.8)
    axes.set_ylabel(name)
    axes.set_ylim(bottom=0)


def _draw_link(axes: Axes, trace: Trace, device: int) -> None:
    width, rates = link_rates(trace, device)
    unit, name = _unit(max(max(series) for series in rates.values()), _RATES)
    starts = list(accumulate([0.0] + [width / 1e3] * (_BINS - 1)))
    for kind, (label, color) in _LANES.items():
        sign = -1 if kind == "write_back" else 1
        axes.step(
            starts,
            [sign * each / unit for each in rates[kind]],
            where="post",
            color=color,
            label=label,
            linewidth=1,
        )
    axes.axhline(0, color="black", linewidth=0.6)
    what = "link" if is_measured(trace) else "asked of the link"
    axes.set_ylabel(f"{what}\n{name}, out below")
    axes.set_xlabel("ms")


def make_figure(trace: Trace, device: int = 0) -> Figure:
    """Residency above and link use below, over the time at which the host ran the operators.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_residency(above, trace, device)
    _draw_link(below, trace, device)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        # Outside the axes, where it covers no data.
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    above.set_title(
        f"device {device}: {len(trace.operators)} operators, {len(trace.transfers)} transfers",
        fontsize=10,
        loc="left",
    )
    return figure


def draw(trace: Trace, path: Path, device: int = 0) -> None:
    """Writes the picture of `make_figure`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError, ValueError: ``path`` cannot be written, or not in that format.
    """
    make_figure(trace, device).savefig(path)


def _figure_of(arguments: argparse.Namespace) -> Figure:
    """Raises:
    OSError, ValueError: the file cannot be read, or has nothing of the device.
    """
    with Progress(f"reading {printable(arguments.trace.name)}") as reading:
        trace = read_trace(arguments.trace, reading)
    devices = sorted({it.device for it in trace.storages.values()})
    if arguments.device not in devices:
        raise ValueError(f"the trace has nothing of device {arguments.device}; it has {devices}")
    return make_figure(trace, arguments.device)


def main(argv: Sequence[str]) -> int:
    """Reads a trace, and writes its picture."""
    parser = argparse.ArgumentParser(prog="python -m torch_uvm plot", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="of torch_uvm.tools.record_accesses")
    parser.add_argument(
        "-o", "--output", metavar="PICTURE", type=Path, required=True, help="such as step.png"
    )
    parser.add_argument("--device", type=int, default=0, help="0 unless told")
    arguments = parser.parse_args(argv)
    try:
        figure = _figure_of(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        print("plot needs matplotlib, which is not installed: pip install matplotlib", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(printable(error))
    try:
        figure.savefig(arguments.output)
    except (OSError, ValueError) as error:
        parser.error(printable(f"{arguments.output}: {error}"))
    return 0
