"""Addresses under a budget on a GPU: escaped addresses, and addresses captured in a graph, stay valid."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from _cuda import MIB, busy, copy
from _cuda_budget import churn
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

import torch_uvm

pytestmark = pytest.mark.usefixtures("to_the_last_bit")


class TestAddresses:
    """A tensor's bytes are at its address, however the address was obtained."""

    @pytest.fixture
    def pressure(self) -> Iterator[list[torch.Tensor]]:
        torch_uvm.enable(budget=24 * MIB)
        yield [torch.zeros(MIB, device="cuda") for _ in range(10)]  # 40 MiB

    def test_numpy_on_a_cpu_label(self, pressure: list[torch.Tensor]) -> None:
        table = torch.arange(float(MIB), device="cuda")
        array = torch_uvm.to(table, "cpu").numpy()
        for turn in range(1, 4):
            churn(pressure)
            array[:] += 1
            assert torch.equal(table, torch.arange(float(MIB), device="cuda") + 2 * turn - 1)
            churn(pressure)
            table += 1
            torch.cuda.synchronize()
            assert array[5] == 5 + 2 * turn

    def test_dlpack(self, pressure: list[torch.Tensor]) -> None:
        table = torch.arange(float(MIB), device="cuda")
        other = torch.utils.dlpack.from_dlpack(table)
        for turn in range(1, 4):
            churn(pressure)
            other += 1
            churn(pressure)
            assert torch.equal(table, torch.arange(float(MIB), device="cuda") + turn)
        assert other.data_ptr() == table.data_ptr()

    def test_a_bare_address(self, pressure: list[torch.Tensor]) -> None:
        source, target = torch.arange(float(MIB), device="cuda"), torch.zeros(MIB, device="cuda")
        for turn in range(1, 4):
            churn(pressure)
            source += 1
            torch.cuda.synchronize()
            copy(target.data_ptr(), source.data_ptr(), source.nbytes)
            churn(pressure)
            assert torch.equal(target, torch.arange(float(MIB), device="cuda") + turn)

    def test_a_collective_of_a_part(self, pressure: list[torch.Tensor]) -> None:
        """The storage stays until NCCL is done with one part of it, although an operator has used another."""
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        try:
            table = torch.ones(MIB, device="cuda")
            churn(pressure)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                dist.all_reduce(torch.ones(1, device="cuda"))  # makes the communicator, which takes long
                busy(500)
                work = dist.all_reduce(table[: MIB // 2], async_op=True)
            table[MIB // 2 :].add_(1)
            churn(pressure)
            assert work is not None and not work.is_completed()
            assert torch_uvm.residency(table) == {table.device: table.nbytes}
            work.wait()
            torch.cuda.synchronize()
            churn(pressure)
            assert torch_uvm.residency(table) == {torch.device("cpu"): table.nbytes}
            assert table.sum().item() == 1.5 * MIB
        finally:
            dist.destroy_process_group()

    def test_resident_tensors_stay(self, pressure: list[torch.Tensor]) -> None:
        table = torch.ones(MIB, device="cuda")
        with torch_uvm.resident(table):
            address = table.data_ptr()
            churn(pressure)
            assert table.data_ptr() == address
            assert torch_uvm.residency(table) == {torch.device("cuda:0"): table.nbytes}
        assert table.sum().item() == MIB


class TestGraphs:
    @pytest.fixture(autouse=True)
    def budget(self) -> None:
        torch_uvm.enable(budget=32 * MIB)

    def test_operands_stay_while_the_graph_lives(self) -> None:
        kept = [torch.zeros(MIB, device="cuda") for _ in range(10)]
        x = torch.ones(MIB, device="cuda")
        weight = torch.full((MIB,), 3.0, device="cuda")
        (x * weight).sum()  # warm-up before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * weight
            weight += 1
        address = weight.data_ptr()
        for turn in range(4):
            churn(kept)
            x.fill_(turn + 2.0)
            graph.replay()
            assert y[-1].item() == (turn + 2) * (3 + turn)
            assert weight.data_ptr() == address
        del graph, y
        gc.collect()
        torch.cuda.synchronize()
        before = torch_uvm.stats()["written_back"]["bytes"]
        churn(kept)
        churn(kept)
        assert torch_uvm.stats()["written_back"]["bytes"] > before
        assert torch.device("cpu") in torch_uvm.residency(weight), "the tensor is still pinned"
        assert weight[7].item() == 7, "the graph's writes are lost"

    def test_an_address_that_was_asked_for_in_a_capture(self) -> None:
        """As by a launcher of kernels that are no operators. No operator of the graph uses the tensors."""
        source, target = torch.arange(float(MIB), device="cuda"), torch.zeros(MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            copy(target.data_ptr(), source.data_ptr(), source.nbytes, stream)
        kept = [torch.zeros(MIB, device="cuda") for _ in range(12)]
        for turn in range(3):
            churn(kept)
            source.fill_(turn + 1.0)
            graph.replay()
            churn(kept)
            assert bool((target == turn + 1).all())

    def test_captured_before_there_is_a_budget(self) -> None:
        torch_uvm.set_budget(None)
        x = torch.ones(MIB, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        torch_uvm.set_budget(32 * MIB)
        kept = [torch.zeros(MIB, device="cuda") for _ in range(12)]
        for turn in range(3):
            churn(kept)
            x.fill_(float(turn))
            graph.replay()
            assert y[5].item() == turn + 1
