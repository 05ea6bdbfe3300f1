"""Replays logs of allocations on a GPU with our allocators, PyTorch's and RMM's.

All run in one process, with one loop in C++ (csrc/allocator/replay/replay.h), one managed allocation function
and one limit of 4 GiB. Refuses to start unless each card has the limit and 6 GiB free. The replay does
not touch the memory, so our allocators do not prefetch it (populate:false), except in one column. Compiles
for a minute and runs for one. Needs a CUDA toolkit, but no built torch_uvm.

    python benchmarks/bench_replay_peers.py [--json FILE] [--rounds N] [--repeat N] [LOG ...]

| column | description |
| --- | --- |
| none | cudaMallocManaged and cudaFree each time |
| caching, pool, arena, plan | as docs/replay.md has them |
| ... small segments | with segment_min:none: the segments of PyTorch's allocator |
| ... populated | with the default populate:true: a new segment is prefetched |
| torch | PyTorch's native allocator in a torch.cuda.MemPool, by raw_alloc_with_stream and raw_delete |
| rmm-pool, rmm-arena | rmm::mr::pool_memory_resource, arena_memory_resource (pip install librmm-cu13) |
| ... as caching | with an initial size equal to the peak of `caching` |

Pools and arenas get an initial size, which is allocated before the clock starts. It is the size with the
lowest peak among 57 sizes, from half to four times the largest number of live bytes. RMM's cannot grow beyond
it. Ours can, and that time counts.
"""

from __future__ import annotations

import os

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
    "0"  # set before torch is imported, so that PyTorch's allocator stays installed
)
os.environ.setdefault("RMM_DEBUG_LOG_FILE", os.devnull)  # RMM logs a line for each size that is too small

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _environment import RESULTS, ROOT, describe, driver
from _replay_peers_build import NotHere, build
from _replay_peers_logs import columns_of
from _replay_peers_table import FIGURES, Column, table, verdict_lines, verdicts
from _residency_limits import GIB, MARGIN
from _results import write_results

from torch_uvm.allocation_logs import read_log

LIMIT = 4 * GIB
LOGS = sorted((ROOT / "benchmarks" / "logs").glob("*.csv"))
RMM = ("rmm-pool", "rmm-arena")
OTHERS = ("torch", *RMM)
# Variables that change PyTorch's allocator.
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_SIZES = 57  # number of initial sizes that are tried for a pool or an arena
_SLICE = 0.15  # maximum seconds per column and round
_BARE = "populate:false"
_SMALL = f"{_BARE},segment_min:none"


def columns() -> list[Column]:
    return [
        Column("none", "none"),
        Column("caching", "caching", _BARE),
        Column("caching, small segments", "caching", _SMALL),
        Column("caching, populated", "caching"),
        Column("pool", "pool", _BARE),
        Column("arena", "arena", _BARE),
        Column("plan", "plan", _BARE),
        Column("plan, small segments", "plan", _SMALL),
        Column("torch", "torch"),
        *(Column(f"{name}{how}", name) for name in RMM for how in ("", ", as caching")),
    ]


def is_ours(column: Column) -> bool:
    """Whether the column is an allocator of ours. The others are baselines: peers, and bare runtime calls."""
    return column.allocator not in ("none", *OTHERS)


def look(module: Any, log: Any, column: Column, count: int | None) -> dict[str, Any]:
    """Replays the log once, untimed. A failure other than out of memory is reported with its message."""
    try:
        found: dict[str, Any] = module.replay(column.allocator, log, column.options, count or 0, 0)
    except RuntimeError as error:
        return {"failure": str(error)}
    return found


def lowest_peak(module: Any, log: Any, column: Column, live: int) -> int:
    """The initial size with the lowest peak; `live` if no size is enough for the log."""
    tried = []
    for number in range(_SIZES):
        count = -(-live * (8 + number) // 16 // 256) * 256
        seen = look(module, log, column, count)
        if not seen["failure"]:
            tried.append((seen["peak_reserved"], count))
    return min(tried, default=(0, live))[1]


def prepare(module: Any, log: Any, column: Column, live: int, as_caching: int) -> None:
    """The column's memory and call counts, and the initial size of pools and arenas."""
    if column.name.endswith(", as caching"):
        column.bytes = as_caching
    elif column.allocator in ("pool", "arena", *RMM):
        column.bytes = lowest_peak(module, log, column, live)
    seen = look(module, log, column, column.bytes)
    column.failure = seen["failure"]
    if "failed_at" not in seen:
        return
    for key in FIGURES:
        setattr(column, key, seen[key])


def measure(module: Any, log: Any, wanted: Sequence[Column], rounds: int, repeat: int) -> None:
    """Runs rounds over all columns, each starting with a different column. A column replays the log several
    times."""
    here = [column for column in wanted if not column.failure]
    often = {}
    for column in here:
        begin = time.perf_counter()
        module.replay(column.allocator, log, column.options, column.bytes or 0, 1)
        often[column.name] = max(1, min(repeat, int(_SLICE / (time.perf_counter() - begin))))
    for turn in range(rounds):
        for column in [*here[turn % len(here) :], *here[: turn % len(here)]]:
            found = module.replay(
                column.allocator, log, column.options, column.bytes or 0, often[column.name]
            )
            column.seconds.append(found["seconds"])
            column.last_iteration_seconds.append(found["last_iteration_seconds"])


def replay(module: Any, path: Path, arguments: argparse.Namespace, without_rmm: str) -> dict[str, Any]:
    """Runs one log on every column and prints the table."""
    read = read_log(path)
    events, how = columns_of(read)
    log = module.make_log(*events)
    live = read.peak_live_bytes()
    wanted = [it for it in columns() if not without_rmm or it.allocator not in RMM]
    as_caching = look(module, log, Column("", "caching", _BARE), None)["peak_reserved"]
    for column in wanted:
        prepare(module, log, column, live, as_caching)
    measure(module, log, wanted, arguments.rounds, arguments.repeat)
    not_run = {name: without_rmm for name in RMM if without_rmm}
    found = verdicts([it for it in wanted if is_ours(it)], [it for it in wanted if not is_ours(it)])
    print(f"\n{path.name}: {len(read)} rows, at most {live / 2**20:.2f} MiB live; iterations: {how}")
    print("\n".join([*table(wanted, not_run), *verdict_lines(found)]), flush=True)
    if module.managed_bytes() != 0:
        raise RuntimeError(f"{module.managed_bytes()} bytes of managed memory did not come back")
    return {
        "rows": len(read),
        "peak_live_bytes": live,
        "iterations": how,
        "columns": {it.name: it.figures() for it in wanted},
        "not_run": not_run,
        "verdicts": found,
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("logs", nargs="*", type=Path, default=LOGS, metavar="LOG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--rounds", type=int, default=7, help="of all columns (7)")
    parser.add_argument("--repeat", type=int, default=20, help="times through a log in a round, at most (20)")
    parser.add_argument("--verbose", action="store_true", help="show what is compiled")
    args = parser.parse_args(arguments)
    for option in ("rounds", "repeat"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} is {getattr(args, option)}; accepted: at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    for setting in SETTINGS:
        if os.environ.get(setting):
            sys.exit(f"{setting} is set; PyTorch's allocator is measured as it is without")
    if not torch.cuda.is_available():
        sys.exit("bench_replay_peers.py needs a GPU, and a torch that has CUDA")
    try:
        module, without_rmm = build(args.verbose)
    except NotHere as error:
        sys.exit(f"bench_replay_peers.py: {error}")
    torch.zeros(1, device="cuda")  # PyTorch's allocator exists from here on
    try:
        free = module.start(LIMIT, MARGIN)
    except RuntimeError as error:
        sys.exit(f"not safe to run: {error}")
    own = ["python", "benchmarks/bench_replay_peers.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = describe(own) | {
        "device": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "driver": driver(),
        "limit": LIMIT,
        "free_at_start": free,
    }
    versions = f"CUDA {about['cuda']}, driver {about['driver']}, torch {about['torch']}"
    print(f"{about['device']}, {versions}; {about['cpu']}")
    print(f"ns per call of allocate or free: the median of {args.rounds} rounds, and the least")
    document: dict[str, Any] = {"environment": about, "logs": {}}
    target = args.json or Path(os.environ.get("OUT", RESULTS)) / "replay_peers.json"
    for path in args.logs:
        document["logs"][path.name] = replay(module, path, args, without_rmm)
        document["peak_managed_bytes"] = module.peak_managed_bytes()
        write_results(target, document)
    print(f"\nat most {module.peak_managed_bytes() >> 20} MiB of managed memory at once; figures: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
