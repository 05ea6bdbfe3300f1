"""The option segments:stable on a GPU: equal bits, and addresses that never change."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from _cuda import MIB, copy
from _cuda_budget import OPTIMIZERS, Transformer, check, churn, mlp, tokens, training, vectors
from torch import nn

import torch_uvm
from torch_uvm import _C

pytestmark = pytest.mark.usefixtures("stable_segments", "to_the_last_bit")


@pytest.fixture
def stable_segments() -> Iterator[None]:
    _C.set_option("segments", "stable")
    _C.set_option("stable_min", "1MiB")
    yield
    _C.set_option("segments", "managed")
    _C.set_option("stable_min", "8MiB")


@pytest.fixture
def pressure(stable_segments: None) -> list[torch.Tensor]:
    torch_uvm.enable(budget=24 * MIB)
    return [torch.zeros(MIB, device="cuda") for _ in range(10)]  # 40 MiB


class TestTraining:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("make", [mlp, Transformer])
    def test_equals_the_run_without_a_budget(self, make: Callable[[], nn.Module], optimizer: str) -> None:
        program = training(make, vectors if make is mlp else tokens, **OPTIMIZERS[optimizer])
        check(program, share=0.7)


class TestAddresses:
    def test_do_not_change(self, pressure: list[torch.Tensor]) -> None:
        addresses = [each.data_ptr() for each in pressure]
        for turn in range(1, 6):
            churn(pressure)
            for each, address in zip(pressure, addresses, strict=True):
                assert bool((each == turn).all()) and each.data_ptr() == address
        assert torch_uvm.residency_stats()["failures"] == 0

    def test_kernels_and_copies_on_two_streams(self, pressure: list[torch.Tensor]) -> None:
        """An eviction waits for the kernels of every stream that used the storage."""
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for turn in range(6):
            for index, each in enumerate(pressure):
                with torch.cuda.stream(streams[(turn + index) % 2]):
                    streams[(turn + index) % 2].wait_stream(streams[(turn + index + 1) % 2])
                    torch.cuda._sleep(100_000)
                    each.add_(1)
        torch.cuda.synchronize()
        for each in pressure:
            assert bool((each == 6).all())

    def test_freed_on_either_side(self, pressure: list[torch.Tensor]) -> None:
        churn(pressure)
        records = torch_uvm.residency_stats()["records"]
        for evicted in (False, True):
            x = torch.ones(MIB, device="cuda")
            if evicted:
                churn(pressure)
                assert torch_uvm.residency(x) == {torch.device("cpu"): x.nbytes}
            del x
        assert torch_uvm.residency_stats()["records"] == records


class TestInPlace:
    def test_operands_beyond_the_budget_are_used_at_their_address(self, pressure: list[torch.Tensor]) -> None:
        addresses = [each.data_ptr() for each in pressure]
        torch.cuda.synchronize()
        torch_uvm.reset_residency_stats()
        torch_uvm.reset_peak_memory_stats()
        expected = 0
        for turn in range(6):
            torch._foreach_add_(pressure, 1)  # one operator on 40 MiB
            torch.cuda._sleep(10_000_000)
            torch._foreach_mul_(pressure[::-1], 2)
            expected = 2 * (expected + 1)
            if turn % 2 == 0:
                churn(pressure)  # adds one to each, on the device
                expected += 1
        for each in pressure:
            assert bool((each == expected).all())
        figures = torch_uvm.residency_stats()
        assert figures["used_in_place"]["count"] > 0 and figures["failures"] == 0, figures
        assert figures["peak_device_bytes"][torch.device("cuda", 0)] <= 24 * MIB, figures
        assert [each.data_ptr() for each in pressure] == addresses
        assert _C.check_residency() is None

    def test_a_graph_without_room_uses_pinned_memory(self, pressure: list[torch.Tensor]) -> None:
        table = torch.zeros(MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.add_(1)
        churn(pressure)
        with torch_uvm.resident(pressure[:5]):  # 20 MiB; small blocks have some of the other four
            for _ in range(3):
                graph.replay()
            assert torch_uvm.residency(table) == {torch.device("cpu"): table.nbytes}
        churn(pressure)
        assert bool((table == 3).all()) and _C.check_residency() is None


class CapturedTraining:
    """A model of 12 MiB whose training step is a captured graph. A call launches it and returns its loss."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        self.x = torch.randn(64, 1024).cuda()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.step()

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def __call__(self) -> float:
        self.graph.replay()
        return self.loss.item()


class TestGraphs:
    """Captured graphs pin no storage with an address range: they are evicted between launches."""

    def test_inputs_and_results_are_evicted_between_launches(self, pressure: list[torch.Tensor]) -> None:
        table, result = torch.arange(float(MIB), device="cuda"), torch.zeros(MIB, device="cuda")
        addresses = table.data_ptr(), result.data_ptr()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.add(table, 1, out=result)
            table.add_(1)
        evicted = {0: 0, 1: 0}
        for turn in range(5):
            churn(pressure)
            for index, each in enumerate((table, result)):
                evicted[index] += torch_uvm.residency(each) == {torch.device("cpu"): each.nbytes}
            graph.replay()
            churn(pressure)
            assert torch.equal(result, torch.arange(float(MIB), device="cuda") + turn + 1)
            assert torch.equal(table, result)
        assert all(evicted.values()) and (table.data_ptr(), result.data_ptr()) == addresses
        del graph
        gc.collect()
        churn(pressure)
        assert torch.equal(table, result)
        assert torch_uvm.residency_stats()["failures"] == 0 and _C.check_residency() is None

    def test_two_graphs_that_do_not_fit_together(self) -> None:
        """Two models of 36 MiB with gradients and momenta. A graph has the whole step."""
        torch_uvm.enable(budget=None)
        programs = [CapturedTraining(seed) for seed in range(2)]
        expected = [programs[index]() for _ in range(4) for index in range(2)]
        del programs
        gc.collect()
        torch_uvm.enable(budget=40 * MIB)
        programs = [CapturedTraining(seed) for seed in range(2)]
        torch_uvm.reset_residency_stats()
        for turn in range(8):
            assert programs[turn % 2]() == expected[turn], turn
        figures = torch_uvm.residency_stats()
        assert figures["written_back"]["count"] > 0 and figures["failures"] == 0, figures
        assert _C.check_residency() is None

    def test_launches_on_two_streams(self, pressure: list[torch.Tensor]) -> None:
        table = torch.zeros(MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.add_(1)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for turn in range(8):
            stream = streams[turn % 2]
            stream.wait_stream(streams[(turn + 1) % 2])
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                graph.replay()
            churn(pressure)  # evicts the table, after the launch
        torch.cuda.synchronize()
        assert bool((table == 8).all())

    def test_an_address_that_was_asked_for_in_a_capture(self, pressure: list[torch.Tensor]) -> None:
        """As by a launcher of kernels that are no operators."""
        source, target = torch.arange(float(MIB), device="cuda"), torch.zeros(MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            copy(target.data_ptr(), source.data_ptr(), source.nbytes, stream)
        for turn in range(3):
            source.add_(1)
            churn(pressure)
            graph.replay()
            churn(pressure)
            assert torch.equal(target, torch.arange(float(MIB), device="cuda") + turn + 1)
