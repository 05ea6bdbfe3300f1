"""The option segments:stable on a GPU: equal bits, and addresses that never change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from _cuda import MIB
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


class TestTraining:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("make", [mlp, Transformer])
    def test_equals_the_run_without_a_budget(self, make: Callable[[], nn.Module], optimizer: str) -> None:
        program = training(make, vectors if make is mlp else tokens, **OPTIMIZERS[optimizer])
        check(program, share=0.7)


class TestAddresses:
    @pytest.fixture
    def pressure(self, stable_segments: None) -> list[torch.Tensor]:
        torch_uvm.enable(budget=24 * MIB)
        return [torch.zeros(MIB, device="cuda") for _ in range(10)]  # 40 MiB

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

    def test_a_graph_captured_on_an_address(self, pressure: list[torch.Tensor]) -> None:
        table, result = torch.arange(float(MIB), device="cuda"), torch.zeros(MIB, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.add(table, 1, out=result)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            torch.add(table, 1, out=result)
        for turn in range(3):
            churn(pressure)
            table.add_(1)
            graph.replay()
            assert torch.equal(result, torch.arange(float(MIB), device="cuda") + turn + 2)

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
