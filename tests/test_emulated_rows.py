"""Operators that use some rows of a large table. The emulator counts the bytes of these rows only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _spawn import Spawn
from torch import Tensor
from torch.nn import functional as F

import torch_uvm

ROWS, WIDTH = 16384, 64  # 4 MiB, 64 pages of 256 rows
ROW = 4 * WIDTH
OFFSETS = torch.tensor([0])

Use = Callable[[Tensor, Tensor], object]
READS: dict[str, Use] = {
    "index_select": lambda table, rows: table.index_select(0, rows),
    "index_select, from the end": lambda table, rows: table.index_select(-2, rows),
    "embedding": lambda table, rows: F.embedding(rows, table),
    "embedding of int32": lambda table, rows: F.embedding(rows.int(), table),
    "embedding_bag": lambda table, rows: F.embedding_bag(rows, table, OFFSETS.to(table.device), mode="sum"),
}
WRITES: dict[str, Use] = {
    "index_add_": lambda table, rows: table.index_add_(0, rows, table.new_ones(len(rows), WIDTH)),
    "index_copy_": lambda table, rows: table.index_copy_(0, rows, table.new_ones(len(rows), WIDTH)),
}
EVERYTHING: dict[str, Use] = {
    "columns": lambda table, rows: table.index_select(1, rows % WIDTH),
    "rows that are not next to each other": lambda table, rows: table.index_select(0, rows.repeat(2)[::2]),
    "a sum": lambda table, rows: table.sum(),
}


@pytest.fixture
def table() -> Tensor:
    """A table on the host that is used in place, so that its bytes are counted exactly and not by page."""
    if torch_uvm._C.backend() != "emulated":
        pytest.skip("counters are the emulator's")
    made = torch_uvm.memory.zeros(ROWS, WIDTH)
    torch_uvm.advise(made, preferred_location="cpu", accessed_by=made.device)
    torch_uvm.prefetch(made, "cpu")
    torch.accelerator.synchronize()
    return made


def in_place(use: Use, table: Tensor, rows: list[int]) -> int:
    """The bytes of one use that cross the link."""
    index = torch.tensor(rows, dtype=torch.long, device=table.device)
    use(table, index)  # excludes one-time work of the first call
    before = torch_uvm.emulated.counters()["bytes_in_place"]
    use(table, index)
    return torch_uvm.emulated.counters()["bytes_in_place"] - before


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_rows_are_counted_once_each(table: Tensor, name: str) -> None:
    use = (READS | WRITES)[name]
    assert in_place(use, table, [3]) == ROW
    assert in_place(use, table, [ROWS - 1, 0, 7, 8, 7, 9]) == 5 * ROW
    assert in_place(use, table, []) == 0
    assert in_place(use, table, list(range(ROWS))) == ROWS * ROW


@pytest.mark.parametrize("name", EVERYTHING)
def test_other_accesses_count_the_whole_table(table: Tensor, name: str) -> None:
    assert in_place(EVERYTHING[name], table, [3, 5]) == ROWS * ROW


def test_rows_of_a_view_that_is_strided(table: Tensor) -> None:
    """The rows of the view are not contiguous. The gaps between adjacent rows count, as for any strided
    operand."""
    view = table[::2, :16]
    assert in_place(READS["index_select"], view, [4]) == ROW // 4
    assert in_place(READS["index_select"], view, [4, 5]) == 2 * ROW + ROW // 4


def test_only_their_pages_are_faulted(table: Tensor) -> None:
    torch_uvm.advise(table, preferred_location=None, accessed_by=None)
    index = torch.tensor([0, 1, 255, 256, 1024], device=table.device)  # on pages 0, 1 and 4
    before = torch_uvm.emulated.counters()
    F.embedding(index, table)
    after = torch_uvm.emulated.counters()
    assert after["bytes_to_device"] - before["bytes_to_device"] == 3 * (64 << 10)


def test_rows_outside_the_table_raise(table: Tensor) -> None:
    for row in (ROWS, -1):
        with pytest.raises(IndexError):
            table.index_select(0, torch.tensor([row], device=table.device))


def test_the_index_is_read_after_its_copy(spawn: Spawn) -> None:
    """Queued work is delayed: the index is copied when a wait for it occurs."""
    spawn(
        """
        import torch, torch_uvm
        torch_uvm.emulated.configure(seed=5)
        table = torch_uvm.memory.zeros(16384, 64)
        torch_uvm.advise(table, preferred_location="cpu", accessed_by=table.device)
        torch_uvm.prefetch(table, "cpu")
        for row in range(20):
            index = torch.tensor([row, 500 + row]).pin_memory().to(table.device, non_blocking=True)
            torch.accelerator.synchronize() if row == 0 else None
            before = torch_uvm.emulated.counters()["bytes_in_place"]
            table.index_add_(0, index, torch.ones(2, 64, device=table.device))
            assert torch_uvm.emulated.counters()["bytes_in_place"] - before == 2 * 256, row
        assert table.sum().item() == 40 * 64
        """,
        env={"TORCH_UVM_DEVICE": "emu"},
    )
