"""`python -m torch_uvm replay`: the allocations of a log, on several allocators side by side."""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch_uvm
from torch_uvm import _C
from torch_uvm._tools.allocation_logs import AllocationLog, read_log
from torch_uvm._tools.iterations import Iterations, at_lines, find, split_evenly
from torch_uvm._tools.replay import Replay, allocators, ceiling, replay
from torch_uvm._util.escaping import printable
from torch_uvm._util.files import output_file
from torch_uvm.cli.progress import Busy, Progress

SUMMARY = "replay a log of allocations on other allocators"

_MIB = 1 << 20
_LIVE = "#c9d7e8"
_COLORS = ("#2a6f97", "#bc6c25", "#606c38", "#7b2cbf", "#c1121f", "#444444")
_MOST_POINTS = 4000  # points of a line in the picture


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_uvm replay",
        description="Replays a log of torch_uvm.record_allocations, or RMM's, in its order on one thread. "
        "Prints the cost on each allocator: time, memory, calls of the runtime.",
        allow_abbrev=False,
    )
    parser.add_argument("log", metavar="LOG", type=Path, help="CSV: Thread,Time,Action,Pointer,Size,Stream")
    parser.add_argument(
        "--allocator",
        metavar="NAME,...",
        default=",".join(allocators()),
        help="which, in this order; all by default: %(default)s",
    )
    parser.add_argument(
        "--repeat", type=int, default=5, help="repetitions; the median counts; %(default)s by default"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--iterations",
        metavar="N",
        type=int,
        help="split the log into N equal parts; by default they are found by repetition",
    )
    where.add_argument(
        "--iteration-lines",
        metavar="LINE,...",
        help="lines of the file at which iterations begin, and the one behind the last iteration",
    )
    parser.add_argument("--limit", metavar="BYTES", help="the most managed memory, such as 4GiB")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers there")
    parser.add_argument(
        "--plot", metavar="PICTURE", type=Path, help="draw live and reserved bytes, such as log.png"
    )
    return parser


def _iterations(arguments: argparse.Namespace, log: AllocationLog) -> Iterations:
    if arguments.iterations is not None:
        return split_evenly(log, arguments.iterations)
    if arguments.iteration_lines is not None:
        try:
            lines = [int(it) for it in arguments.iteration_lines.split(",")]
        except ValueError:
            raise ValueError(
                f"lines {arguments.iteration_lines!r}; expected numbers such as 2,101,200"
            ) from None
        return at_lines(log, lines)
    return find(log)


def figures(done: Replay) -> dict[str, Any]:
    """One allocator in the output of `--json`: bytes, seconds, counts."""
    return {
        "description": done.description,
        "failure": done.failure or None,
        "failed_at_row": done.failed_at if done.failure else None,
        "calls": done.calls,
        "seconds": list(done.seconds),
        "ns_per_call": done.ns_per_call if done.seconds else None,
        "last_iteration_seconds": list(done.last_iteration_seconds),
        "last_iteration_ns_per_call": done.last_iteration_ns_per_call if done.seconds else None,
        "peak_live_bytes": done.peak_live,
        "peak_reserved_bytes": done.peak_reserved,
        "mean_live_bytes": done.mean_live,
        "mean_reserved_bytes": done.mean_reserved,
        "mean_waste": done.mean_waste,
        "waste_at_peak": done.waste_at_peak,
        "runtime_allocations": done.runtime_allocations,
        "runtime_frees": done.runtime_frees,
        "events_recorded": done.events_recorded,
        "details": done.details,
    }


def _about(path: Path, log: AllocationLog, iterations: Iterations) -> str:
    lines = [
        f"{printable(path.name)}: {len(log)} rows, {log.allocation_count} allocations, at most "
        f"{_C.format_bytes(log.peak_live_bytes())} live, {len(log.logged_streams)} streams"
    ]
    left_out = [
        f"{log.skipped_frees} frees of what is older than the log ({_C.format_bytes(log.skipped_bytes)})"
        if log.skipped_frees
        else "",
        f"{log.failures} failed allocations" if log.failures else "",
    ]
    if any(left_out):
        lines.append(f"left out: {' and '.join(filter(None, left_out))}")
    if log.never_freed:
        lines.append(f"never freed in it, and so at its end: {len(log.never_freed)} allocations")
    lines.append(f"iterations: {iterations.how}")
    return "\n".join(lines)


def table(replays: Sequence[Replay], log: AllocationLog) -> str:
    """One line for each allocator."""
    heads = (
        "allocator",
        "ns/call",
        "in the last",
        "ms in all",
        "reserved",
        "waste",
        "at peak",
        "allocs",
        "frees",
        "events",
    )
    rows: list[tuple[str, ...]] = [heads]
    for done in replays:
        if done.failure:
            rows.append((done.allocator, *[""] * (len(heads) - 1)))
            continue
        rows.append(
            (
                done.allocator,
                f"{done.ns_per_call:.0f}",
                f"{done.last_iteration_ns_per_call:.0f}",
                f"{done.median_seconds * 1e3:.3f}",
                _C.format_bytes(done.peak_reserved),
                f"{100 * done.mean_waste:.1f} %",
                f"{100 * done.waste_at_peak:.1f} %",
                str(done.runtime_allocations),
                str(done.runtime_frees),
                str(done.events_recorded),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = []
    failed = {it.allocator: it for it in replays if it.failure}
    for row in rows:
        if row[0] in failed:
            it = failed[row[0]]
            reason = it.failure.splitlines()[0]
            line = f"{it.allocator.ljust(widths[0])}  failed in row {it.failed_at + 1}: {reason}"
        else:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            line = "  ".join(cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


def thinned(levels: array[int], most: int = _MOST_POINTS) -> tuple[list[int], list[int]]:
    """At most `most` points of a line, by row: the maximum of each interval, so that no peak is lost."""
    step = -(-len(levels) // most) or 1
    starts = range(0, len(levels), step)
    return list(starts), [max(levels[at : at + step]) for at in starts]


def draw(replays: Sequence[Replay], iterations: Iterations, title: str, path: Path) -> None:
    """Draws live bytes, and what each allocator has reserved, over the rows of the log.

    Raises:
        ModuleNotFoundError: there is no matplotlib. OSError, ValueError: ``path`` cannot be written so.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=130, layout="constrained")
    axes = figure.subplots()
    longest = max(replays, key=lambda it: len(it.live))
    rows, live = thinned(longest.live)
    axes.fill_between(rows, [it / _MIB for it in live], step="post", color=_LIVE, label="live")
    for number, done in enumerate(replays):
        rows, reserved = thinned(done.reserved)
        axes.step(
            rows,
            [it / _MIB for it in reserved],
            where="post",
            color=_COLORS[number % len(_COLORS)],
            linewidth=1.2,
            linestyle="-" if number < len(_COLORS) else "--",
            label=f"reserved, {done.allocator}" + (", until it failed" if done.failure else ""),
        )
    for boundary in iterations.boundaries:
        axes.axvline(boundary, color="#999999", linewidth=0.5)
    axes.set_xlabel("row of the log")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)  # a $ in a name is literal
    figure.savefig(path)


def _check_output(parser: argparse.ArgumentParser, path: Path | None) -> None:
    if path is None:
        return
    try:
        output_file(path)
    except OSError as error:
        parser.error(str(error))


def main(argv: Sequence[str]) -> int:
    """Replays a log on each allocator.

    Returns:
        0 if an allocator replayed all of it (the table shows which did not), else 1; a usage error exits
        with 2.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    names = arguments.allocator.split(",")
    for name in names:
        if name not in allocators():
            parser.error(f"no allocator {name!r}; accepted: {', '.join(allocators())}")
    if not 1 <= arguments.repeat <= 1000:
        parser.error(f"--repeat {arguments.repeat}; accepted: 1 to 1000")
    for path in (arguments.json, arguments.plot):
        _check_output(parser, path)
    reading = Progress(f"reading {printable(arguments.log.name)}")
    try:
        log = read_log(arguments.log, reading)
        reading.close()
        with Busy("looking for iterations"):
            iterations = _iterations(arguments, log)
        if arguments.limit is not None:
            torch_uvm.set_limit(arguments.limit)
        most = ceiling(log)
    except (OSError, ValueError, RuntimeError) as error:
        reading.close()
        parser.error(printable(error))
    print(_about(arguments.log, log, iterations))
    replays = []
    for name in names:
        progress = Progress(f"replaying on {name}")
        replays.append(
            replay(log, name, iterations, repeat=arguments.repeat, most_bytes=most, progress=progress)
        )
        progress.close()
    backend = _C.backend()
    clock = "this host's time; its memory is emulated" if backend == "emulated" else f"time on {backend}"
    print(f"{arguments.repeat} times, the median; {clock}\n")
    print(table(replays, log))
    if arguments.json is not None:
        try:
            _write_json(arguments.json, arguments.log, log, iterations, replays)
        except OSError as error:
            parser.error(f"{arguments.json}: {error}")
    if arguments.plot is not None:
        try:
            with Busy("drawing"):
                draw(replays, iterations, f"{printable(arguments.log.name)}, {len(log)} rows", arguments.plot)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != "matplotlib":
                raise
            print("--plot needs matplotlib, which is not installed: pip install matplotlib", file=sys.stderr)
            return 1
        except (OSError, ValueError) as error:
            parser.error(printable(f"{arguments.plot}: {error}"))
    return 1 if all(it.failure for it in replays) else 0


def _write_json(
    path: Path, source: Path, log: AllocationLog, iterations: Iterations, replays: Sequence[Replay]
) -> None:
    report = {
        "log": source.name,
        "rows": len(log),
        "allocations": log.allocation_count,
        "peak_live_bytes": log.peak_live_bytes(),
        "streams": len(log.logged_streams),
        "skipped_frees": log.skipped_frees,
        "failures": log.failures,
        "never_freed": len(log.never_freed),
        "iterations": {"how": iterations.how, "boundaries": list(iterations.boundaries)},
        "backend": _C.backend(),
        "allocators": {it.allocator: figures(it) for it in replays},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
