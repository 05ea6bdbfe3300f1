"""Advice: calls that set and undo it, its lifetime, and its pages."""

# torch has no stubs for torch.emu; wrong arguments are the point of some tests.
# mypy: disable-error-code="arg-type, attr-defined"

from __future__ import annotations

import copy

import torch
from _emulated_hints import (
    calls,
    fresh_counters,  # noqa: F401  (every test has it)
    on_host,
)
from _hint_pages import MIB, NO_ADVICE, PAGE, advice, attributes, neighbours, page_bytes
from torch import nn

import torch_uvm
from torch_uvm import _C, advise

EMU = torch.device("emu:0")
CPU = torch.device("cpu")


class TestAdvise:
    def test_sets_and_undoes(self) -> None:
        x = on_host(2 * MIB)
        advise(x, read_mostly=True)
        assert advice(x) == (True, None, [])
        advise(x, preferred_location="cpu")
        advise(x, accessed_by=[EMU, "cpu"])
        assert advice(x) == (True, -1, [-1, 0])
        advise(x)
        assert advice(x) == (True, -1, [-1, 0])
        advise(x, preferred_location=0, accessed_by="cpu")  # replaces earlier advice
        assert advice(x) == (True, 0, [-1])
        advise(x, False, None, ())
        assert advice(x) == NO_ADVICE

    def test_makes_one_call_a_range_and_statement(self) -> None:
        x = on_host(2 * MIB)
        advise(x, read_mostly=True, preferred_location=0, accessed_by=[0, "cpu", 0])
        assert calls("advise") == 4
        advise(x, accessed_by=None)
        assert calls("advise") == 6

    def test_leaves_neighbours_alone(self) -> None:
        page = page_bytes()
        left, x, right = neighbours(3, page * 5 // 2)
        advise(x, read_mostly=True, preferred_location="cpu")
        assert not attributes(x)["uniform"]
        whole = _C.page_ranges([x], page)
        assert _C.range_attributes(*whole[0])["read_mostly"]
        assert advice(left) == advice(right) == NO_ADVICE

    def test_does_not_outlive_its_tensor(self) -> None:
        x = on_host(2 * MIB)
        address = x.data_ptr()
        advise(x, read_mostly=True, preferred_location="cpu", accessed_by=EMU)
        del x
        y = on_host(2 * MIB)
        assert y.data_ptr() == address
        assert advice(y) == NO_ADVICE

    def test_of_a_view_does_not_outlive_the_tensor(self) -> None:
        x = on_host(2 * MIB)
        y = torch_uvm.to(x, EMU)
        advise(y[PAGE : 4 * PAGE], read_mostly=True)
        advise(y[2 * PAGE : 3 * PAGE], read_mostly=False)
        assert _C.range_attributes(x.data_ptr() + PAGE, PAGE)["read_mostly"]
        del x
        assert not attributes(y)["uniform"]  # the bytes are alive, so the advice is too
        address = y.data_ptr()
        block = _C.block_of(y)
        del y
        assert block is not None
        assert not any(_C.range_attributes(address + i * PAGE, PAGE)["read_mostly"] for i in range(32))

    def test_on_a_shared_page_ends_with_the_first_tensor(self) -> None:
        page = page_bytes()
        run = neighbours(3, page * 5 // 2)
        del run[0 if run[1].data_ptr() % page == 0 else 2]  # the two tensors meet inside a page
        border = run[1].data_ptr()
        advise(run, read_mostly=True)
        [(address, count)] = _C.page_ranges(run, page)
        assert address < border < address + count and border % page != 0
        assert _C.range_attributes(address, count)["read_mostly"]
        del run[0]
        for begin in range(address, address + count, page):
            assert _C.range_attributes(begin, page)["read_mostly"] == (begin >= border)
        run.clear()
        assert not _C.range_attributes(address, count)["read_mostly"]
        assert _C.range_attributes(address, count)["uniform"]

    def test_freeing_others_makes_no_calls(self) -> None:
        x, y = on_host(2 * MIB), on_host(2 * MIB)
        advise(x, read_mostly=True)
        made = calls("advise")
        del y
        assert calls("advise") == made
        advise(x, read_mostly=False)
        made = calls("advise")
        del x
        assert calls("advise") == made


def test_copied_modules_carry_no_advice() -> None:
    model = torch_uvm.to(nn.Linear(1024, 1024), "emu", managed=True)
    advise(model, read_mostly=True)
    with torch_uvm.enabled():
        assert advice(copy.deepcopy(model).weight) == NO_ADVICE
