"""Replays logs of allocations on a GPU with our allocators, PyTorch's and RMM's.

All run in one process, with one loop in C++ (csrc/allocator/replay/replay.h), one managed allocation function
and one limit of 4 GiB. Refuses to start unless each card has the limit and 6 GiB free. The replay does
not touch the memory, so our allocators do not prefetch it (populate:false). Compiles for a minute and runs
for one. Needs a CUDA toolkit, but no built torch_uvm.

    python benchmarks/bench_replay_peers.py [--json FILE] [--rounds N] [LOG ...]

| column | description |
| --- | --- |
| caching, pool, arena, plan | as docs/annex.md has them |
| torch | PyTorch's native allocator in a torch.cuda.MemPool, by raw_alloc_with_stream and raw_delete |
| rmm-pool, rmm-arena | rmm::mr::pool_memory_resource, arena_memory_resource (pip install librmm-cu13) |

Pools and arenas get an initial size, which is allocated before the clock starts. It is the size with the
lowest peak among 57 sizes, from half to four times the largest number of live bytes. RMM's cannot grow beyond
it. Ours can, and that time counts.
"""

from __future__ import annotations

import os

# Set before torch is imported, so that PyTorch's allocator stays installed.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ.setdefault("RMM_DEBUG_LOG_FILE", os.devnull)  # RMM logs a line for each size that is too small

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _replay_peers import Column, columns_of, table
from _replay_peers_build import NotHere, build
from _results import RESULTS, ROOT, describe, device_description, write_results
from _runs import GIB, MARGIN

from torch_uvm.allocation_logs import read_log

LIMIT = 4 * GIB
LOGS = sorted((ROOT / "benchmarks" / "logs").glob("*.csv"))
RMM = ("rmm-pool", "rmm-arena")
NAMES = ("caching", "pool", "arena", "plan", "torch", *RMM)
SIZED = ("pool", "arena", *RMM)  # those with an initial size
# Variables that change PyTorch's allocator.
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_SIZES = 57  # number of initial sizes that are tried for a pool or an arena
_SLICE = 0.15  # maximum seconds per column and round


class Replays:
    """Replays of one log by the compiled module."""

    def __init__(self, module: Any, events: tuple[Any, ...], live: int) -> None:
        self.module, self.log, self.live = module, module.make_log(*events), live

    def run(self, column: Column, repeat: int) -> dict[str, Any]:
        found: dict[str, Any] = self.module.replay(
            column.name, self.log, "populate:false", column.bytes or 0, repeat
        )
        return found

    def look(self, column: Column) -> dict[str, Any]:
        """Once, untimed. A failure other than out of memory is reported with its message."""
        try:
            return self.run(column, 0)
        except RuntimeError as error:
            return {"failure": str(error)}

    def prepare(self, column: Column) -> None:
        """The column's memory and call counts, and the initial size of pools and arenas."""
        if column.name in SIZED:
            tried = []
            for number in range(_SIZES):
                column.bytes = -(-self.live * (8 + number) // 16 // 256) * 256
                seen = self.look(column)
                if not seen["failure"]:
                    tried.append((seen["peak_reserved"], column.bytes))
            column.bytes = min(tried, default=(0, self.live))[1]
        seen = self.look(column)
        for key in seen.keys() & vars(column).keys() - {"seconds", "last_iteration_seconds"}:
            setattr(column, key, seen[key])

    def measure(self, columns: Sequence[Column], rounds: int) -> None:
        """Runs rounds over all columns, each starting with a different column. A column replays the log
        several times."""
        often = {}
        for column in columns:
            begin = time.perf_counter()
            self.run(column, 1)
            often[column.name] = max(1, min(20, int(_SLICE / (time.perf_counter() - begin))))
        for turn in range(rounds):
            first = turn % len(columns)
            for column in [*columns[first:], *columns[:first]]:
                found = self.run(column, often[column.name])
                column.seconds += found["seconds"]
                column.last_iteration_seconds += found["last_iteration_seconds"]


def replay(module: Any, path: Path, rounds: int, without_rmm: str) -> dict[str, Any]:
    """Runs one log on every column and prints the table."""
    read = read_log(path)
    events, how = columns_of(read)
    replays = Replays(module, events, read.peak_live_bytes())
    columns = [Column(name) for name in NAMES if not (without_rmm and name in RMM)]
    for column in columns:
        replays.prepare(column)
    replays.measure([column for column in columns if not column.failure], rounds)
    not_run = {name: without_rmm for name in RMM if without_rmm}
    print(f"\n{path.name}: {len(read)} rows, at most {replays.live / 2**20:.2f} MiB live; iterations: {how}")
    print("\n".join(table(columns, not_run)), flush=True)
    if module.managed_bytes() != 0:
        raise RuntimeError(f"{module.managed_bytes()} bytes of managed memory did not come back")
    found = {"rows": len(read), "peak_live_bytes": replays.live, "iterations": how}
    return found | {"columns": {it.name: it.figures() for it in columns}, "not_run": not_run}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("logs", nargs="*", type=Path, default=LOGS, metavar="LOG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--rounds", type=int, default=7, help="of all columns (7)")
    args = parser.parse_args(arguments)
    for setting in SETTINGS:
        if os.environ.get(setting):
            sys.exit(f"{setting} is set; PyTorch's allocator is measured as it is without")
    if not torch.cuda.is_available():
        sys.exit("bench_replay_peers.py needs a GPU, and a torch that has CUDA")
    try:
        module, without_rmm = build()
    except NotHere as error:
        sys.exit(f"bench_replay_peers.py: {error}")
    torch.zeros(1, device="cuda")  # PyTorch's allocator exists from here on
    try:
        free = module.start(LIMIT, MARGIN)
    except RuntimeError as error:
        sys.exit(f"not safe to run: {error}")
    own = ["python", "benchmarks/bench_replay_peers.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = describe(own) | device_description()
    about |= {"cuda": torch.version.cuda, "limit": LIMIT, "free_at_start": free}
    document: dict[str, Any] = {"environment": about, "logs": {}}
    target = args.json or Path(os.environ.get("OUT", RESULTS)) / "replay_peers.json"
    for path in args.logs:
        document["logs"][path.name] = replay(module, path, args.rounds, without_rmm)
        document["peak_managed_bytes"] = module.peak_managed_bytes()
        write_results(target, document)
    print(f"\nat most {module.peak_managed_bytes() >> 20} MiB of managed memory at once; figures: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
