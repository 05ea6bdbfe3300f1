"""Finding the iterations of the loop that a log of allocations was recorded from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from torch_uvm import allocation_iterations
from torch_uvm._tools.allocation_logs import HEADER, read_log
from torch_uvm._tools.iterations import _repetition


def _write(path: Path, *rows: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in [HEADER, *rows]))
    return path


def _loop(path: Path, iterations: list[list[int]], prologue: int = 3, epilogue: int = 1) -> Path:
    """A log of a loop. Each iteration allocates these sizes and frees them in reverse order, except for the
    last one, which is freed in the middle of the next iteration. Parameters are allocated first and freed
    last."""
    rows: list[str] = []
    address = 0x1000
    kept: tuple[int, int] | None = None

    def row(action: str, at: int, size: int) -> None:
        rows.append(f"1,00:00:00.000000,{action},{at:#x},{size},0")

    for number in range(prologue):  # parameters
        row("allocate", address + number * 0x100000, 1000 + number)
    address += 0x100000 * prologue
    for sizes in iterations:
        held = []
        for size in sizes:
            row("allocate", address, size)
            held.append((address, size))
            address += 0x100000
        if kept is not None:
            row("free", *kept)
        kept = held.pop()
        for it in reversed(held):
            row("free", *it)
    for number in range(epilogue):
        row("free", 0x1000 + number * 0x100000, 1000 + number)
    return _write(path, *rows)


class TestIterations:
    def test_a_loop_is_found(self, tmp_path: Path) -> None:
        log = read_log(_loop(tmp_path / "log.csv", [[10, 20, 30, 5]] * 6))
        found = allocation_iterations.find(log)
        assert found.how == "4 of 8 rows, found by repetition"  # the first iteration has no survivor to free
        level = 0
        levels = [0]
        for event in log:
            level += event.bytes if event.action == "allocate" else -event.bytes
            levels.append(level)
        # Boundaries are where only one survivor and the parameters are live.
        assert {levels[at] for at in found.boundaries} == {1000 + 1001 + 1002 + 5}
        assert [after - before for before, after in found.spans()] == [8] * 4
        assert found.boundaries[-1] == len(log) - 1

    def test_a_loop_with_varying_sizes(self, tmp_path: Path) -> None:
        chance = random.Random(1)
        sizes = [[k * 784, k * 49, k * 7, k] for k in (chance.randrange(1, 9) for _ in range(7))]
        found = allocation_iterations.find(read_log(_loop(tmp_path / "log.csv", sizes)))
        assert found.how == "5 of 8 rows, found by repetition but for sizes"

    def test_no_loop_without_repetition(self, tmp_path: Path) -> None:
        chance = random.Random(2)
        rows: list[str] = []
        live: list[int] = []
        for at in range(200):
            if live and chance.random() < 0.5:
                rows.append(f"1,00:00:00.000000,free,{live.pop(chance.randrange(len(live))):#x},8,0")
            else:
                live.append(at * 16 + 16)
                rows.append(f"1,00:00:00.000000,allocate,{live[-1]:#x},8,0")
        found = allocation_iterations.find(read_log(_write(tmp_path / "log.csv", *rows)))
        assert found.boundaries == (0, 200) and "no loop" in found.how

    def test_of_an_empty_log(self, tmp_path: Path) -> None:
        assert allocation_iterations.find(read_log(_write(tmp_path / "log.csv"))).boundaries == (0, 0)

    def test_explicit_counts(self, tmp_path: Path) -> None:
        log = read_log(_loop(tmp_path / "log.csv", [[10, 20]] * 4, prologue=0, epilogue=0))
        assert len(log) == 15  # 4 rows per iteration; the first iteration frees no survivor
        assert allocation_iterations.split_evenly(log, 3).boundaries == (0, 5, 10, 15)
        for count in (0, -1, 16):
            with pytest.raises(ValueError, match=f"{count} iterations"):
                allocation_iterations.split_evenly(log, count)

    @pytest.mark.parametrize("seed", range(5))
    def test_finds_a_hidden_repetition(self, seed: int) -> None:
        chance = random.Random(seed)
        period, times = chance.randrange(10, 60), chance.randrange(4, 9)
        before, after = ([chance.randrange(50, 99) for _ in range(chance.randrange(40))] for _ in range(2))
        # Inner repetitions: the same few numbers occur several times in each period.
        piece = [chance.randrange(3) if at % 3 else 40 + at // 3 for at in range(period)]
        found = _repetition([*before, *piece * times, *after])
        assert found is not None
        assert found.period == period
        assert found.begin <= len(before) and found.end >= len(before) + period * times
