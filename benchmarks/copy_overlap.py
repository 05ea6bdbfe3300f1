"""Measures which copies across the link overlap with kernels: plain memory, managed memory, staged copies.

    python benchmarks/copy_overlap.py [--json FILE]

For a GPU. Runs a stream of kernels and 16 copies of 32 MiB on their own streams, first separately and then
concurrently. The kernels: matrix products and sums of 0.2 ms (sums need the device's memory bandwidth),
attention of 10 ms, and products of 11 ms that keep every multiprocessor until they end. `hidden` is the
share of the shorter of the two that cost no time. "staged" copies managed memory through two slots of plain
device memory per direction, as the residency engine does. Uses 256 MiB of managed memory under a limit of
4 GiB. The guard requires that and 6 GiB free.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _residency_limits import MARGIN

LIMIT = 4 << 30  # managed bytes
MIB = 1 << 20
PIECE = 32 * MIB
PIECES = 16
SLOT = 16 * MIB
TRIES = 4

Work = Callable[[], None]


class Copies:
    """Copies pieces from pinned memory to a buffer, from another buffer back, or both, on one stream per
    direction."""

    def __init__(self, to_device: bool, to_host: bool, buffers: Any, staged: bool) -> None:
        import torch

        self.to_device, self.to_host, self.staged = to_device, to_host, staged
        self.buffers = buffers
        self.pinned = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.slots = [
            [torch.empty(SLOT, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(2)
        ]
        self.links = [torch.cuda.Stream(priority=-1) for _ in range(2)]
        self.sides = [torch.cuda.Stream(priority=-1) for _ in range(2)]
        self.emptied: list[list[Any]] = [[None, None], [None, None]]

    def streams(self) -> list[Any]:
        return [*self.links, *self.sides]

    def __call__(self) -> None:
        for _ in range(PIECES):
            if self.to_device:
                self.copy(0, self.buffers[0], self.pinned[0], self.links[0], self.sides[0])
            if self.to_host:
                self.copy(1, self.pinned[1], self.buffers[1], self.sides[1], self.links[1])

    def copy(self, direction: int, to: Any, source: Any, fills: Any, empties: Any) -> None:
        import torch

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


def milliseconds(works: list[Work], streams: list[Any]) -> float:
    """Runs all works concurrently until the last one ends. Returns the best of several tries."""
    import torch

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
    import torch

    a, b, c = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    long = torch.randn(64 * MIB, device="cuda")

    def products() -> None:
        for _ in range(80):
            torch.mm(a, b, out=c)

    def sums() -> None:
        for _ in range(90):
            long.add_(1)

    query = torch.randn(1, 16, 32768, 64, device="cuda", dtype=torch.bfloat16)
    d, e, f = (torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attention() -> None:
        for _ in range(2):
            torch.nn.functional.scaled_dot_product_attention(query, query, query)

    def large_products() -> None:
        for _ in range(3):
            torch.mm(d, e, out=f)

    return {"products": products, "sums": sums, "attention": attention, "large_products": large_products}


def measure() -> list[dict[str, Any]]:
    import torch

    import torch_uvm

    free = torch.cuda.mem_get_info()[0]
    if free < LIMIT + MARGIN:
        raise SystemExit(f"refused: {free} bytes are free on the card, and {LIMIT + MARGIN} have to be")
    plain = [torch.zeros(PIECE, dtype=torch.uint8, device="cuda") for _ in range(2)]
    managed = [torch_uvm.zeros(PIECE, dtype=torch.uint8, device="cuda") for _ in range(2)]
    works = kernels()
    rows = []
    for kind, buffers, staged in (
        ("plain", plain, False),
        ("managed", managed, False),
        ("staged", managed, True),
    ):
        for way, to_device, to_host in (("in", True, False), ("out", False, True), ("both", True, True)):
            copies = Copies(to_device, to_host, buffers, staged)
            alone = milliseconds([copies], copies.streams())
            count = PIECES * PIECE * (2 if way == "both" else 1)
            row: dict[str, Any] = {"memory": kind, "way": way, "gb_s": count / alone / 1e6}
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
    os.environ["TORCH_UVM_CONF"] = f"limit:{LIMIT}"  # set before torch_uvm is imported
    from _environment import describe
    from _results import write_results

    rows = measure()
    if arguments.json:
        environment = describe(["python", "benchmarks/copy_overlap.py"])
        write_results(arguments.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
