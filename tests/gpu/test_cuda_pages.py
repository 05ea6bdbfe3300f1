"""The effect of moves and hints on pages, by the CUDA driver's attributes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from _cuda import ACCESSED_BY, CPU_ID, LAST_PREFETCH, MIB, NO_ID, PREFERRED, READ_MOSTLY, range_attribute
from torch import nn

import torch_uvm
from torch_uvm import _C

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def concurrent() -> None:
    if not _C.device_properties(0)["concurrent_managed_access"]:
        pytest.skip("this GPU has no concurrent access to managed memory: there are no hints")
    gc.collect()
    torch_uvm.memory.empty_cache()


def pages(mebibytes: int = 32, device: str = "cuda") -> torch.Tensor:
    """The whole pages that belong to the tensor alone."""
    return torch_uvm.memory.ones(mebibytes * MIB, dtype=torch.uint8, device=device)


def last_prefetch(x: torch.Tensor) -> int:
    return range_attribute(x, LAST_PREFETCH)[0]


class TestPrefetch:
    def test_pages_go_to_the_target(self) -> None:
        x = pages(device="cpu")
        torch_uvm.prefetch(x, "cuda")
        assert last_prefetch(x) == 0
        assert torch_uvm.residency(x) == {CUDA: x.nbytes}
        torch_uvm.prefetch(x, "cpu")
        torch.cuda.synchronize()
        assert last_prefetch(x) == CPU_ID
        assert torch_uvm.residency(x) == {CPU: x.nbytes}
        assert int(x.sum()) == x.numel()

    def test_of_a_module(self) -> None:
        with torch_uvm.enabled():
            model = nn.Linear(4096, 4096).cuda()
        torch_uvm.prefetch(model, "cpu")
        torch_uvm.prefetch(model)
        torch.cuda.synchronize()
        assert last_prefetch(model.weight.detach()) == 0

    def test_on_another_stream(self) -> None:
        x, side = pages(device="cpu"), torch.cuda.Stream()
        torch_uvm.prefetch(x, "cuda", stream=side)
        side.synchronize()
        assert last_prefetch(x) == 0 and int(torch_uvm.to(x, "cuda").sum()) == x.numel()

    def test_leaves_neighbours_alone(self) -> None:
        whole = pages(64)
        torch_uvm.prefetch(whole, "cuda")
        middle = whole[16 * MIB : 32 * MIB]
        torch_uvm.prefetch(middle, "cpu")
        torch.cuda.synchronize()
        assert last_prefetch(middle[4 * MIB : -4 * MIB]) == CPU_ID
        assert last_prefetch(whole[: 12 * MIB]) == 0 and last_prefetch(whole[36 * MIB :]) == 0

    def test_a_move_to_the_device_starts_one(self) -> None:
        x = pages(device="cpu")
        torch_uvm.prefetch(x, "cpu")
        torch.cuda.synchronize()
        torch_uvm.to(x, "cuda")
        assert last_prefetch(x) == 0

    def test_a_fresh_device_tensor_is_populated(self) -> None:
        assert last_prefetch(torch_uvm.memory.empty(32 * MIB, dtype=torch.uint8)) == 0


class TestAdvise:
    def test_is_set_and_undone(self) -> None:
        x = pages()
        torch_uvm.advise(x, read_mostly=True, preferred_location="cpu", accessed_by="cuda")
        assert range_attribute(x, READ_MOSTLY) == [1]
        assert range_attribute(x, PREFERRED) == [CPU_ID]
        assert 0 in range_attribute(x, ACCESSED_BY, 4)
        torch_uvm.advise(x, read_mostly=False, preferred_location=None, accessed_by=None)
        assert range_attribute(x, READ_MOSTLY) == [0]
        assert range_attribute(x, PREFERRED) == [NO_ID]
        assert set(range_attribute(x, ACCESSED_BY, 4)) == {NO_ID}
        assert int(x.sum()) == x.numel()

    def test_agrees_with_our_own_reading(self) -> None:
        x = pages()
        torch_uvm.advise(x, read_mostly=True, preferred_location="cuda")
        found = _C.range_attributes(x.data_ptr(), x.nbytes)
        assert found["read_mostly"] is True and found["preferred_location"] == 0

    def test_ends_with_its_tensor(self) -> None:
        x = pages()
        address = x.data_ptr()
        torch_uvm.advise(x, read_mostly=True, preferred_location="cpu", accessed_by="cuda")
        del x
        again = pages()
        assert again.data_ptr() == address, "the same block is used again"
        assert range_attribute(again, READ_MOSTLY) == [0] and range_attribute(again, PREFERRED) == [NO_ID]

    def test_used_in_place_by_kernels(self) -> None:
        x = pages(device="cpu")
        torch_uvm.advise(x, preferred_location="cpu", accessed_by="cuda")
        torch_uvm.prefetch(x, "cpu")
        y = torch_uvm.to(x, "cuda", non_blocking=True)
        y += 1
        torch.cuda.synchronize()
        assert int(x[0]) == int(x[-1]) == 2


class TestDiscard:
    @pytest.mark.parametrize("then", ["cuda", "cpu"])
    def test_later_writes_are_kept(self, then: str) -> None:
        x = pages()
        before = x._version
        torch_uvm.discard(x)
        assert x._version > before
        y = torch_uvm.to(x, then)
        y.fill_(3)
        torch.cuda.synchronize()
        assert int(x.long().sum()) == 3 * x.numel()


class TestNonContiguous:
    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.view(64, -1)[::2],
            lambda x: x.view(1024, -1).t(),
            lambda x: x[5:-5],
            lambda x: x[:1].expand(7),
            lambda x: x[:0],
        ],
        ids=["rows", "transposed", "inner", "expanded", "empty"],
    )
    def test_hints_change_no_contents(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = torch_uvm.memory.empty(8 * MIB, dtype=torch.uint8).copy_(torch.arange(8 * MIB) % 251)
        expected = x.cpu().clone()
        for device in ("cpu", "cuda"):
            torch_uvm.prefetch(view(x), device)
            torch_uvm.advise(view(x), read_mostly=True)
            torch_uvm.advise(view(x), read_mostly=False)
        assert torch.equal(x.cpu(), expected)
