"""Traces of two equal steps, made longer: beside traces in which they were recorded; steps that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_uvm._tools.cards import load_card
from torch_uvm._tools.plans import Loop
from torch_uvm._tools.repeated_steps import repeated
from torch_uvm.traces import Trace, read_trace

MIB = 1 << 20
STEP = ("forward", *["middle"] * 6, "backward", "update")


@pytest.fixture
def record(tmp_path: Path) -> Callable[[int], Trace]:
    """A trace of as many steps. Each has a batch, which is there until that of the next step has been made,
    an activation and a gradient. The last step ends with its update, as in a dry run."""

    def of(steps: int) -> Trace:
        head = {"format": "torch_uvm accesses", "version": 5, "units": {"time": "us", "size": "bytes"}}
        lines: list[dict[str, Any]] = [head | {"budgets": [None]}]
        for storage in (1, 2):  # the weight, and the first batch
            lines.append({"storage": storage, "device": 0, "bytes": 64 * MIB, "resident": True})
        for step in range(steps):
            batch, activation, gradient = (100 * step + it for it in (2, 50, 60))
            uses: dict[str, tuple[list[int], list[int]]]
            uses = {"forward": ([1, batch], []), "middle": ([1], []), "backward": ([1, activation], [])}
            for at, name in enumerate(STEP):
                reads, writes = uses.get(name, ([gradient], [1]))
                number = len(STEP) * step + at
                times = {"time": 1000 * number, "in_place_ok": name == "update"}
                lines.append({"operator": name} | times | {"reads": reads, "writes": writes})
                lines.append({"resident": (128 + at) * MIB, "device": 0})
                if name == "forward":
                    lines.append({"birth": activation, "device": 0, "bytes": 64 * MIB})
                if name == "backward":
                    lines.append({"birth": gradient, "device": 0, "bytes": 64 * MIB})
                    lines.append({"death": activation})
                lines.append({"ran": number, "operators": 1, "us": 1000})
            if step < steps - 1:
                lines += [{"step": "end"}, {"birth": batch + 100, "device": 0, "bytes": 64 * MIB}]
                lines += [{"death": batch}, {"death": gradient}]
        path = tmp_path / "trace"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_trace(path)

    return of


def roles(trace: Trace) -> list[Any]:
    """The operators, with the places of what they use instead of the storages' numbers."""
    made = {name: (at, n) for at, op in enumerate(trace.operators) for n, name in enumerate(op.births)}
    rows = []
    for op in trace.operators:
        used = [[made.get(name, name) for name in names] for names in (op.reads, op.writes, op.deaths)]
        rows.append((op.name, op.in_place_ok, used, [trace.storages[name].bytes for name in op.births]))
    return rows


def test_it_is_what_would_have_been_recorded(record: Callable[[int], Trace]) -> None:
    recorded, made = record(5), repeated(record(2), len(STEP), 3)
    assert made is not None
    assert roles(made)[:-1] == roles(recorded)[:-1]  # what is freed behind the last operator is known here
    assert [op.time_us for op in made.operators] == [op.time_us for op in recorded.operators]
    assert made.resident == recorded.resident and made.groups == recorded.groups
    assert made.steps[:-1] == recorded.steps
    card = load_card("h200")
    loops = Loop(made, card, on_gpu=False), Loop(recorded, card, on_gpu=False)
    assert loops[0].memory == loops[1].memory and loops[0].memory.peak_bytes == 256 * MIB
    for budget in (300 * MIB, 220 * MIB):
        assert loops[0].point(budget) == loops[1].point(budget)
    assert loops[0].point(220 * MIB).out > 0


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (9, {"name": "other"}),
        (9, {"in_place_ok": True}),
        (9, {"workspace": 512}),
        (16, {"reads": (1,)}),
        (16, {"reads": (1, 102)}),  # the batch, and not the activation
        (16, {"deaths": []}),
        (9, {"births": []}),
    ],
)
def test_steps_that_differ(record: Callable[[int], Trace], at: int, change: dict[str, Any]) -> None:
    trace = record(2)
    trace.operators[at] = replace(trace.operators[at], **change)
    assert repeated(trace, len(STEP), 2) is None


def test_storages_of_other_sizes(record: Callable[[int], Trace]) -> None:
    trace = record(2)
    trace.storages[150] = replace(trace.storages[150], bytes=MIB)
    assert repeated(trace, len(STEP), 2) is None


@pytest.mark.parametrize("size", [0, 10])
def test_fewer_than_two_steps(record: Callable[[int], Trace], size: int) -> None:
    assert repeated(record(2), size, 2) is None
