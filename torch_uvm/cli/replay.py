"""`python -m torch_uvm tools replay`: the allocations of a log, on several allocators side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_uvm import _C
from torch_uvm._tools.allocation_logs import AllocationLog, read_log
from torch_uvm._tools.iterations import Iterations, find, split_evenly
from torch_uvm._tools.replay import Replay, allocators, replay
from torch_uvm._util.escaping import printable
from torch_uvm.cli.progress import Progress

SUMMARY = "replay a log of allocations on other allocators"

_HEADS = "allocator|ns/call|in the last|ms in all|reserved|waste|at peak|allocs|frees".split("|")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_uvm tools replay",
        description="Replays a log of record_allocations, or RMM's, in its order on one thread. "
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
    parser.add_argument(
        "--iterations",
        metavar="N",
        type=int,
        help="split the log into N equal parts; by default they are found by repetition",
    )
    return parser


def _about(name: str, log: AllocationLog, iterations: Iterations) -> str:
    streams = len({event.stream for event in log})
    lines = [
        f"{name}: {len(log)} rows, {log.allocation_count} allocations, at most "
        f"{_C.format_bytes(log.peak_live_bytes())} live, {streams} streams"
    ]
    if log.skipped_frees:
        older = _C.format_bytes(log.skipped_bytes)
        lines.append(f"left out: {log.skipped_frees} frees of what is older than the log ({older})")
    if log.failures:
        lines.append(f"left out: {log.failures} failed allocations")
    if log.never_freed:
        lines.append(f"never freed in it, and so at its end: {len(log.never_freed)} allocations")
    return "\n".join([*lines, f"iterations: {iterations.how}"])


def _cells(done: Replay) -> tuple[str, ...]:
    return (
        done.allocator,
        f"{done.ns_per_call:.0f}",
        f"{done.last_iteration_ns_per_call:.0f}",
        f"{done.ns_per_call * done.calls / 1e6:.3f}",
        _C.format_bytes(done.peak_reserved),
        f"{100 * done.mean_waste:.1f} %",
        f"{100 * done.waste_at_peak:.1f} %",
        str(done.runtime_allocations),
        str(done.runtime_frees),
    )


def _table(replays: Sequence[Replay]) -> Iterator[str]:
    """One line for each allocator."""
    yield _line(_HEADS)
    for done in replays:
        why = f"failed in row {done.failed_at + 1}: {done.failure.partition(chr(10))[0]}"
        yield f"{done.allocator:<10}  {why}" if done.failure else _line(_cells(done))


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<10}" + "".join(f"{cell:>13}" for cell in cells[1:])


def main(argv: Sequence[str]) -> int:
    """Replays a log on each allocator.

    Returns:
        0 if an allocator replayed all of it (the table shows which did not), else 1; a usage error exits
        with 2.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    names, source = arguments.allocator.split(","), printable(arguments.log.name)
    for name in names:
        if name not in allocators():
            parser.error(f"no allocator {name!r}; accepted: {', '.join(allocators())}")
    if not 1 <= arguments.repeat <= 1000:
        parser.error(f"--repeat {arguments.repeat}; accepted: 1 to 1000")
    replays = []
    try:
        with Progress(f"reading {source}") as reading:
            log = read_log(arguments.log, reading)
        count = arguments.iterations
        iterations = find(log) if count is None else split_evenly(log, count)
        for name in names:
            with Progress(f"replaying on {name}") as progress:
                replays.append(replay(log, name, iterations, repeat=arguments.repeat, progress=progress))
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(printable(error))
    backend = _C.backend()
    clock = "this host's time; its memory is emulated" if backend == "emulated" else f"time on {backend}"
    print(_about(source, log, iterations))
    print(f"{arguments.repeat} times, the median; {clock}\n")
    print("\n".join(_table(replays)))
    return 1 if all(done.failure for done in replays) else 0
