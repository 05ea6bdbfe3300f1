"""Measures which copies across the link overlap with kernels: plain memory, managed memory, staged copies.

    python benchmarks/copy_overlap.py [--json FILE]

For a GPU. Runs a stream of kernels and 16 copies of 32 MiB on their own streams, first separately and then
concurrently. The kernels: matrix products and sums of 0.2 ms (sums need the device's memory bandwidth),
attention of 10 ms, and products of 11 ms that keep every multiprocessor until they end. `hidden` is the
share of the shorter of the two that cost no time. "staged" copies managed memory through two slots of plain
device memory per direction, as the residency engine does. Uses 256 MiB of managed memory under a limit of
4 GiB. The guard requires that and 6 GiB free. Figures of a card's profile come from here: "plain", both ways.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCH_UVM_CONF"] = "limit:4GiB"  # before torch_uvm is imported

import torch
from _results import ROOT, describe, device_description, write_results

import torch_uvm

sys.path.insert(0, str(ROOT / "tests"))
from _gpu_guard import GIB, MIB, check_room

PIECE, PIECES, SLOT = 32 * MIB, 16, 16 * MIB
TRIES = 4
WAYS = {"in": (True, False), "out": (False, True), "both": (True, True)}

Work = Callable[[], object]


class Copies:
    """Copies pieces from pinned memory to a buffer, from another buffer back, or both, on one stream per
    direction."""

    def __init__(self, ways: tuple[bool, bool], buffers: list[torch.Tensor], staged: bool) -> None:
        self.ways, self.buffers, self.staged = ways, buffers, staged
        self.pinned = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.slots = [[torch.empty(SLOT, dtype=torch.uint8, device="cuda") for _ in "ab"] for _ in "ab"]
        self.links, self.sides = ([torch.cuda.Stream(priority=-1) for _ in range(2)] for _ in range(2))
        self.emptied: list[list[Any]] = [[None, None], [None, None]]

    def streams(self) -> list[torch.cuda.Stream]:
        return [*self.links, *self.sides]

    def __call__(self) -> None:
        for _ in range(PIECES):
            if self.ways[0]:
                self.copy(0, self.buffers[0], self.pinned[0], self.links[0], self.sides[0])
            if self.ways[1]:
                self.copy(1, self.pinned[1], self.buffers[1], self.sides[1], self.links[1])

    def copy(self, direction: int, to: torch.Tensor, source: torch.Tensor, fills: Any, empties: Any) -> None:
        if not self.staged:
            with torch.cuda.stream(self.links[direction]):
                to.copy_(source, non_blocking=True)
            return
        for at in range(0, PIECE, SLOT):
            number = at // SLOT % 2
            slot = self.slots[direction][number]
            with torch.cuda.stream(fills):
                if self.emptied[direction][number] is not None:
                    fills.wait_event(self.emptied[direction][number])
                slot.copy_(source[at : at + SLOT], non_blocking=True)
                empties.wait_event(fills.record_event())
            with torch.cuda.stream(empties):
                to[at : at + SLOT].copy_(slot, non_blocking=True)
                self.emptied[direction][number] = empties.record_event()


def milliseconds(works: list[Work], streams: list[torch.cuda.Stream]) -> float:
    """Runs all works concurrently until the last one ends. Returns the best of several tries."""
    best = float("inf")
    compute = torch.cuda.current_stream()
    for _ in range(TRIES):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for stream in streams:
            stream.wait_event(begin)
        for work in works:
            work()
        for stream in streams:
            compute.wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best


def kernels() -> dict[str, Work]:
    def times(count: int, call: Work) -> Work:
        return lambda: [call() for _ in range(count)]

    def matrices(size: int) -> list[torch.Tensor]:
        return [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    (a, b, c), (d, e, f) = matrices(4096), matrices(16384)
    long = torch.randn(64 * MIB, device="cuda")
    query = torch.randn(1, 16, 32768, 64, device="cuda", dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    return {
        "products": times(80, lambda: torch.mm(a, b, out=c)),
        "sums": times(90, lambda: long.add_(1)),
        "attention": times(2, lambda: attend(query, query, query)),
        "large_products": times(3, lambda: torch.mm(d, e, out=f)),
    }


def measure() -> list[dict[str, Any]]:
    check_room(4 * GIB)
    plain = [torch.zeros(PIECE, dtype=torch.uint8, device="cuda") for _ in range(2)]
    managed = [torch_uvm.memory.zeros(PIECE, dtype=torch.uint8, device="cuda") for _ in range(2)]
    works = kernels()
    rows = []
    for kind, buffers in (("plain", plain), ("managed", managed), ("staged", managed)):
        for way, ways in WAYS.items():
            copies = Copies(ways, buffers, kind == "staged")
            alone = milliseconds([copies], copies.streams())
            row: dict[str, Any] = {"memory": kind, "way": way}
            row["gb_s"] = sum(ways) * PIECES * PIECE / alone / 1e6
            for name, work in works.items():
                by_itself = milliseconds([work], [])
                together = milliseconds([copies, work], copies.streams())
                row[f"hidden_behind_{name}"] = (alone + by_itself - together) / min(alone, by_itself)
            print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = measure()
    if arguments.json:
        environment = describe(["python", "benchmarks/copy_overlap.py"]) | device_description()
        write_results(arguments.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
