"""An embedding table that is larger than the device's budget. Each step uses some of its rows.

    python examples/embedding_table.py                                      # on the emulated accelerator
    TORCH_UVM_CONF=limit:4GiB python examples/embedding_table.py --json f   # on a GPU: a table of 512 MiB

A step looks up rows, computes a loss from them, and updates the same rows. This is sparse SGD, written as an
`index_add_` on a table without a gradient, so that no gradient of the table's size exists. The script
compares five ways to store the table, for two access patterns: rows drawn anew in each step from a Zipf
distribution over the whole table, and contiguous rows that repeat. When to use which:

- **A budget, and nothing else** (`torch_uvm.enable(budget=...)`): the engine keeps a table that does not fit
  on the host and uses it in place: a row crosses the link once per use. Best for rows that vary.
- **Advice, without a budget**: `advise(table, preferred_location="cpu", accessed_by=device)` has the same
  effect in the driver: no migration and no faults. For programs whose other tensors fit.
- **Page faults** (no budget, no advice): each row brings its whole page, slowly. Better if the same few pages
  are used all the time: they stay on the device. So sort a table by frequency, or put the frequent rows into
  their own tensor, which the budget can keep resident.
- **Prefetches of the rows' pages**: one call per run of pages, so for rows that are contiguous and fit. Of
  scattered rows, one in some hundred already touches almost every page, whether faulted or prefetched.
- **The whole table copied, part by part**: needs no managed memory. Worth it only if a step uses most rows
  several times.

The emulator counts bytes and models times: a row used in place costs its bytes. A real link also has a cost
per small read. On a GPU times are measured. The table would fit there, so before each step that uses other
rows it is moved to the host, to simulate a full device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from demo import format_bytes, format_table
from torch import Tensor

import torch_uvm

MIB = 1 << 20
PAGE = 64 << 10  # unit of migration
RATE = -0.1
LINK = (
    "bytes_to_device",
    "bytes_to_host",
    "bytes_copied_to_device",
    "bytes_copied_to_host",
    "bytes_in_place",
)


@dataclass(frozen=True)
class Case:
    """The rows that the steps use."""

    name: str
    fraction: float  # share of all rows, per step
    again: bool  # the same contiguous rows in each step

    def draw(self, rows: int, steps: int) -> list[Tensor]:
        """Row numbers per step, sorted and unique, as a data loader would deliver them."""
        wanted = max(1, int(self.fraction * rows))
        if self.again:
            return [torch.arange(wanted)] * steps
        generator = torch.Generator().manual_seed(wanted)
        weights = 1 / torch.arange(1, rows + 1)[torch.randperm(rows, generator=generator)]
        return [torch.multinomial(weights, wanted, generator=generator).sort().values for _ in range(steps)]


CASES = [
    Case("0.1 % anywhere", 0.001, again=False),
    Case("1 % anywhere", 0.01, again=False),
    Case("10 % anywhere", 0.1, again=False),
    Case("1 % again", 0.01, again=True),
]


@dataclass(frozen=True)
class Batch:
    """Row numbers, (rows of the batch,), on the CPU and on the device."""

    here: Tensor
    there: Tensor


class Way(Protocol):
    """A way to store a table, (rows, width)."""

    def __init__(self, initial: Tensor, device: torch.device, budget: int) -> None: ...
    def look_up(self, batch: Batch) -> Tensor: ...
    def add(self, batch: Batch, change: Tensor) -> None: ...
    def put_back(self) -> None:
        """Moves the table to the host, if pages of it are on the device."""

    def contents(self) -> Tensor:
        """A copy of the table on the CPU."""


class OneTensor:
    """A table under the device's label. Subclasses decide where its bytes are."""

    table: Tensor

    def look_up(self, batch: Batch) -> Tensor:
        return F.embedding(batch.there, self.table)

    def add(self, batch: Batch, change: Tensor) -> None:
        self.table.index_add_(0, batch.there, change, alpha=RATE)
        torch_uvm.step()  # marks the step, as PyTorch's optimizers do

    def put_back(self) -> None:
        pass

    def contents(self) -> Tensor:
        return self.table.cpu()


class Engine(OneTensor):
    def __init__(self, initial: Tensor, device: torch.device, budget: int) -> None:
        torch_uvm.enable(budget=budget)
        self.table = initial.to(device)


class Advice(OneTensor):
    def __init__(self, initial: Tensor, device: torch.device, budget: int) -> None:
        torch_uvm.enable(budget=None)
        self.table = torch_uvm.memory.empty(*initial.shape, device=device)
        torch_uvm.advise(self.table, preferred_location="cpu", accessed_by=device)
        torch_uvm.to(self.table, "cpu").copy_(initial)
        torch_uvm.prefetch(self.table, "cpu")


class Faults(OneTensor):
    def __init__(self, initial: Tensor, device: torch.device, budget: int) -> None:
        torch_uvm.enable(budget=None)
        self.table = torch_uvm.memory.empty(*initial.shape, device=device)
        torch_uvm.to(self.table, "cpu").copy_(initial)
        self.put_back()

    def put_back(self) -> None:
        torch_uvm.prefetch(self.table, "cpu")


class Prefetches(Faults):
    def look_up(self, batch: Batch) -> Tensor:
        a_page = PAGE // (self.table.shape[1] * self.table.itemsize)
        pages = torch.unique_consecutive(batch.here // a_page)
        ends = (pages.diff() != 1).nonzero().flatten() + 1
        runs = [run for run in torch.tensor_split(pages, ends.tolist()) if len(run)]
        torch_uvm.prefetch([self.table[int(run[0]) * a_page : (int(run[-1]) + 1) * a_page] for run in runs])
        return super().look_up(batch)


class Copies:
    """The table in ordinary pinned memory. An eighth of it is on the device at a time."""

    def __init__(self, initial: Tensor, device: torch.device, budget: int) -> None:
        torch_uvm.enable(budget=None)
        self.device = device
        self.parts = initial.clone().pin_memory().split(len(initial) // 8)

    def wanted(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """For each part: the part, the rows that are used, and their positions in the batch."""
        first = 0
        for part in self.parts:
            begin, end = torch.searchsorted(batch.here, torch.tensor([first, first + len(part)])).tolist()
            yield part, batch.there[begin:end] - first, slice(begin, end)
            first += len(part)

    def look_up(self, batch: Batch) -> Tensor:
        found = [
            F.embedding(rows, part.to(self.device, non_blocking=True)) for part, rows, _ in self.wanted(batch)
        ]
        return torch.cat(found)

    def add(self, batch: Batch, change: Tensor) -> None:
        for part, rows, where in self.wanted(batch):
            there = part.to(self.device, non_blocking=True)
            part.copy_(there.index_add_(0, rows, change[where], alpha=RATE), non_blocking=True)
        torch.accelerator.synchronize()  # the next step reads the host's copy

    def put_back(self) -> None:
        pass

    def contents(self) -> Tensor:
        return torch.cat(self.parts)


WAYS: dict[str, type[Way]] = {
    "in place, by the engine": Engine,
    "in place, by advice": Advice,
    "page faults": Faults,
    "the rows' pages prefetched": Prefetches,
    "the whole table copied": Copies,
}


@dataclass(frozen=True)
class Cost:
    """The cost of a step: measured on a GPU, modelled on the emulator. Only the emulator counts bytes."""

    milliseconds: float
    link_bytes: float | None


def crossed(device: torch.device) -> int | None:
    """Bytes that have crossed the link; None on a GPU, which does not report them."""
    if device.type != "emu":
        return None
    counted = torch_uvm.emulated.counters()
    return sum(counted[name] for name in LINK)


def clock(device: torch.device) -> float:
    """Milliseconds, after all queued work is done."""
    torch.accelerator.synchronize()
    return torch_uvm.emulated.time_us() / 1e3 if device.type == "emu" else time.perf_counter() * 1e3


def step(table: Way, batch: Batch, direction: Tensor) -> Tensor:
    rows = table.look_up(batch).requires_grad_()  # (rows of the batch, width)
    loss = (rows * direction).sum(1).sub(1).square().mean()
    loss.backward()
    assert rows.grad is not None
    table.add(batch, rows.grad)
    return loss.detach()


@dataclass(frozen=True)
class Outcome:
    costs: dict[str, Cost]  # by the case's name
    losses: list[float]
    contents: Tensor


def run(
    way: type[Way], initial: Tensor, drawn: dict[Case, list[Tensor]], device: torch.device, budget: int
) -> Outcome:
    """Trains on all cases, one after the other. The first step of each is not counted."""
    table = way(initial, device, budget)
    direction = torch.linspace(-1, 1, initial.shape[1]).to(device)
    costs, losses = {}, []
    for case, batches in drawn.items():
        times: list[float] = []
        before = crossed(device)
        for number, batch in enumerate([Batch(rows, rows.to(device)) for rows in batches]):
            if device.type != "emu" and not case.again:
                table.put_back()
            begin = clock(device)
            loss = step(table, batch, direction)
            times.append(clock(device) - begin)
            losses.append(loss.item())
            if number == 0:
                before = crossed(device)
        after = crossed(device)
        moved = None if before is None or after is None else (after - before) / (len(batches) - 1)
        costs[case.name] = Cost(statistics.median(times[1:]), moved)
    contents = table.contents()
    return Outcome(costs, losses, contents)


def check_equal(outcomes: dict[str, Outcome]) -> None:
    """Raises AssertionError unless all tables are equal, to the last bit."""
    (first, expected), *others = outcomes.items()
    for name, outcome in others:
        if outcome.losses != expected.losses or not torch.equal(outcome.contents, expected.contents):
            raise AssertionError(f"{name} differs from {first}: {outcome.losses} and {expected.losses}")


def tabulate(
    outcomes: dict[str, Outcome], figure: Callable[[Cost], float], unit: Callable[[float], str]
) -> str:
    """One row per way, one column per case; the last row names the fastest way."""
    columns = {}
    for case in CASES:
        figures = {name: figure(outcome.costs[case.name]) for name, outcome in outcomes.items()}
        least = min(figures, key=lambda name: figures[name])
        columns[case.name] = {name: unit(value) for name, value in figures.items()} | {"the least": least}
    return format_table(columns)


def at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number}; accepted: at least {least}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=partial(at_least, 8), metavar="MIB", help="of the table; 64, on a GPU 512"
    )
    parser.add_argument("--width", type=partial(at_least, 1), default=64, help="floats a row: %(default)s")
    parser.add_argument("--steps", type=partial(at_least, 1), default=5, help="of each case: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    device = torch.accelerator.current_accelerator()
    if device is None:
        sys.exit("there is no accelerator, and torch_uvm registered none")
    size = (options.size or (64 if device.type == "emu" else 512)) * MIB
    torch_uvm.set_limit(4 * size if device.type == "emu" else min(4 * size, 2 << 30))
    if device.type == "emu":
        torch_uvm.emulated.configure(memory=size // 2)
    budget = size * 7 // 16
    rows = size // (4 * options.width)
    initial = torch.randn(rows, options.width, generator=torch.Generator().manual_seed(0))
    print(f"A table of {format_bytes(initial.nbytes)}, {rows:,} rows, on {device}", end="; ")
    print(f"a budget of {format_bytes(budget)} where there is one.\n", flush=True)

    drawn = {case: case.draw(rows, options.steps + 1) for case in CASES}
    outcomes = {}
    for name, way in WAYS.items():
        outcomes[name] = run(way, initial, drawn, device, budget)
        torch_uvm.memory.empty_cache()
    check_equal(outcomes)
    kind = "modelled" if device.type == "emu" else "measured"
    print(f"Time of a step, {kind}:")
    print(tabulate(outcomes, lambda cost: cost.milliseconds, lambda ms: f"{ms:.2f} ms"))
    if device.type == "emu":
        print("\nBytes across the link in a step, both ways, counted:")
        print(tabulate(outcomes, lambda cost: cost.link_bytes or 0, lambda count: format_bytes(round(count))))
    print("\nAll ways gave the same losses and the same table, to the last bit.")
    if options.json:
        figures = {
            "device": str(device),
            "table_bytes": initial.nbytes,
            "row_bytes": 4 * options.width,
            "budget": budget,
            "times": kind,
            "steps": {
                name: {case: vars(cost) for case, cost in outcome.costs.items()}
                for name, outcome in outcomes.items()
            },
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
