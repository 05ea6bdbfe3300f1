"""Bytes that tensors cover, and pages that belong to one tensor alone. Hints apply to these ranges."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import torch_uvm
from torch_uvm import _C

PAGE = 65536
MOST_RUNS = 65536  # kMostRuns

View = Callable[[torch.Tensor], torch.Tensor]


def covered(ranges: list[tuple[int, int]], base: int) -> set[int]:
    return {address - base + i for address, count in ranges for i in range(count)}


def reached(t: torch.Tensor) -> set[int]:
    """Covered bytes, by walking every element."""
    positions = [int(t.storage_offset())]
    for size, stride in zip(t.shape, t.stride(), strict=True):
        positions = [p + i * stride for p in positions for i in range(size)]
    return {p * t.itemsize + i for p in positions for i in range(t.itemsize)}


VIEWS: dict[str, View] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "offset": lambda x: x.flatten()[5:],
    "rows": lambda x: x[3:7],
    "columns": lambda x: x[:, 2:5],
    "every other row": lambda x: x[::2],
    "every other column": lambda x: x[:, ::2],
    "one element": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[1:3].expand(4, 2, 12),
    "windows": lambda x: x.flatten().unfold(0, 5, 3),
    "diagonal": lambda x: x.diagonal(),
    "interleaved": lambda x: x.as_strided((7, 5), (3, 4)),
    "halves": lambda x: x.view(torch.float16),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_runs_are_the_bytes_that_sizes_and_strides_reach(view: View) -> None:
    x = view(torch_uvm.memory.zeros(10, 12))
    runs = _C.byte_runs(x)
    assert covered(runs, x.untyped_storage().data_ptr()) == reached(x)
    ends = [address + count for address, count in runs]
    assert all(end < begin for end, (begin, _) in zip(ends, runs[1:], strict=False))  # sorted and disjoint


def test_runs_of_random_strides() -> None:
    chance = random.Random(7)
    storage = torch_uvm.memory.empty(4000, dtype=torch.uint8)
    for _ in range(300):
        sizes = [chance.randint(1, 6) for _ in range(chance.randint(0, 4))]
        strides = [chance.choice([0, 1, 2, 3, 5, 8, 40, 41, 200]) for _ in sizes]
        x = storage.as_strided(sizes, strides, chance.randint(0, 50))
        assert covered(_C.byte_runs(x), storage.data_ptr()) == reached(x), (sizes, strides)


def test_covered_gaps_are_smaller_than_asked_for() -> None:
    chance = random.Random(8)
    storage = torch_uvm.memory.empty(4000, dtype=torch.uint8)
    for _ in range(300):
        sizes = [chance.randint(1, 6) for _ in range(chance.randint(1, 3))]
        strides = [chance.choice([1, 3, 8, 40, 41, 200]) for _ in sizes]
        x = storage.as_strided(sizes, strides, chance.randint(0, 50))
        own, wide = reached(x), covered(_C.byte_runs(x, gap=16), storage.data_ptr())
        assert own <= wide
        for extra in wide - own:  # bytes of the tensor are near on both sides
            assert any(extra - i in own for i in range(16)) and any(extra + i in own for i in range(16))


def test_runs_end_with_a_storage_made_smaller() -> None:
    x = torch_uvm.memory.empty(1000, dtype=torch.uint8)
    view = x[100:900]
    x.untyped_storage().resize_(0)
    assert _C.byte_runs(view) == []
    assert _C.page_ranges([view], PAGE) == []


def test_runs_are_bounded_and_never_beyond_the_elements() -> None:
    x = torch_uvm.memory.empty(4 * MOST_RUNS, dtype=torch.uint8)[::2]
    runs = _C.byte_runs(x)
    assert len(runs) == MOST_RUNS
    assert all(count == 1 and (address - x.data_ptr()) % 2 == 0 for address, count in runs)
    assert len(_C.byte_runs(x, gap=PAGE)) == 1


def test_padding_belongs_to_ranges_that_reach_the_end_of_the_storage() -> None:
    x = torch_uvm.memory.empty(11 * 2**20 + 7, dtype=torch.uint8)  # its block is 12 MiB
    address, size, _ = _C.block_of(x) or (0, 0, 0)
    assert size > x.nbytes
    assert _C.page_ranges([x], PAGE) == [(address, size)]
    assert _C.page_ranges([x[:-1]], PAGE) == [(address, 11 * 2**20)]


def test_pages_are_rounded_inwards() -> None:
    x = torch_uvm.memory.empty(40 * PAGE, dtype=torch.uint8)
    base = x.data_ptr()
    assert base % PAGE == 0
    assert _C.page_ranges([x[1 : 3 * PAGE]], PAGE) == [(base + PAGE, 2 * PAGE)]
    assert _C.page_ranges([x[PAGE : 3 * PAGE - 1]], PAGE) == [(base + PAGE, PAGE)]
    assert _C.page_ranges([x[1 : 2 * PAGE - 1]], PAGE) == []


def test_ranges_that_touch_or_overlap_are_one() -> None:
    x = torch_uvm.memory.empty(40 * PAGE, dtype=torch.uint8)
    base, half = x.data_ptr(), PAGE // 2
    assert _C.page_ranges([x[half : 3 * PAGE + half], x[3 * PAGE + half : 5 * PAGE]], PAGE) == [
        (base + PAGE, 4 * PAGE)
    ]
    assert _C.page_ranges([x[: 3 * PAGE], x[PAGE : 4 * PAGE], x[: 2 * PAGE]], PAGE) == [(base, 4 * PAGE)]
    assert _C.page_ranges([x.view(-1, PAGE)[::2], x.view(-1, PAGE)[1::2]], PAGE) == [(base, 40 * PAGE)]


def test_only_covered_gaps_differ_between_exact_and_wide_pages() -> None:
    x = torch_uvm.memory.empty(40, PAGE, dtype=torch.uint8)
    columns = x[:, : PAGE - 512]
    assert _C.page_ranges([columns], PAGE) == []  # for a discard
    assert _C.page_ranges([columns], PAGE, gap=PAGE) == [(x.data_ptr(), 39 * PAGE)]  # for a prefetch
    # A gap of a whole page may belong to another tensor.
    assert len(_C.page_ranges([x[::2]], PAGE, gap=PAGE)) == 20


def test_labels_of_the_same_bytes_count_once() -> None:
    x = torch_uvm.memory.empty(40 * PAGE, dtype=torch.uint8)
    assert _C.page_ranges([x, torch_uvm.to(x, "cpu")], PAGE) == _C.page_ranges([x], PAGE)


def test_segments_are_never_joined() -> None:
    large: list[torch.Tensor] = []
    holding: set[tuple[int, int]] = set()
    while len(holding) < 2:  # what earlier tests freed may have room for many in one segment
        large.append(torch_uvm.memory.empty(10 * 2**20, dtype=torch.uint8))
        segments = [
            (s["address"], s["address"] + s["total_size"]) for s in torch_uvm.memory.memory_snapshot()
        ]
        holding = {(begin, end) for begin, end in segments for x in large if begin <= x.data_ptr() < end}
    ranges = _C.page_ranges(large, PAGE)
    assert sum(bytes for _, bytes in ranges) == sum(x.nbytes for x in large)
    for start, bytes in ranges:
        assert any(begin <= start and start + bytes <= end for begin, end in holding)


def test_unmanaged_tensors_have_no_pages() -> None:
    assert _C.page_ranges([torch.empty(2**20), torch.empty(3, device="meta")], PAGE) == []
