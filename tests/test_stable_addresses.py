"""The option segments:stable: large storages keep their address for life, whatever a budget evicts.

On the emulated accelerator real memory is mapped and unmapped, so an access to an evicted storage would
end the process.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from _models import Gpt
from _spawn import Spawn
from torch import nn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C, emulated

MIB = 1024**2
DEVICE = torch.device("emu", 0)


@pytest.fixture(autouse=True)
def stable_segments() -> Iterator[None]:
    gc.collect()
    torch_uvm.empty_cache()
    before = {each["key"]: each["value"] for each in _C.describe_options()}
    _C.set_option("segments", "stable")
    _C.set_option("stable_min", "1MiB")
    yield
    gc.collect()
    _C.request_budget(None, None)
    for name in ("segments", "stable_min"):  # the whole suite may run with this home
        _C.set_option(name, before[name])
    torch_uvm.empty_cache()
    assert _C.check_allocator() is None


class Addresses:
    """The addresses of tensors, by identity: equal whenever they are looked at."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []

    def look(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.nbytes >= MIB:
                address = self.known.setdefault(id(tensor), tensor.data_ptr())
                self.kept.append(tensor)
                assert tensor.data_ptr() == address


def begin(budget: int | None) -> int:
    """Starts a run. \\return the failures of earlier tests"""
    gc.collect()
    torch_uvm.empty_cache()
    torch_uvm.reset_peak_memory_stats()
    torch_uvm.enable(budget=budget)
    torch_uvm.reset_residency_stats()
    torch.manual_seed(0)
    failures: int = torch_uvm.residency_stats()["failures"]
    return failures


def train(budget: int | None, steps: int = 6, foreach: bool = False) -> list[torch.Tensor]:
    failures = begin(budget)
    model = Gpt(True, width=512).to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    addresses, results = Addresses(), []
    for _ in range(steps):
        words = torch.randint(0, 10, (16, 16)).to("emu")
        loss = F.cross_entropy(model(words), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach().cpu())
        states = [each for state in optimizer.state.values() for each in state.values()]
        addresses.look([*model.parameters(), *(it for it in states if isinstance(it, torch.Tensor))])
    results += [each.detach().cpu() for each in model.parameters()]
    figures = torch_uvm.residency_stats()
    assert figures["failures"] == failures and _C.check_residency() is None
    if budget is not None:
        assert addresses.known
        if not foreach:  # whose one operator has all parameters, and their gradients and states
            assert figures["over_budget"] == 0 and figures["peak_device_bytes"][DEVICE] <= budget
        assert figures["fetched"]["count"] > 0 and figures["written_back"]["count"] > 0
    return results


class TestTraining:
    @pytest.mark.parametrize("foreach", [False, True])
    def test_equals_the_run_without_a_budget(self, foreach: bool) -> None:
        expected = train(None, foreach=foreach)
        peak = torch_uvm.max_memory_allocated(DEVICE)
        maps = emulated.counters()["map_calls"]
        for share in (0.75, 0.5):
            for ours, reference in zip(train(int(share * peak), foreach=foreach), expected, strict=True):
                assert torch.equal(ours, reference)
        assert emulated.counters()["map_calls"] > maps

    def test_deferred_updates(self, steps_at_once_afterwards: None) -> None:
        expected = train(None)
        peak = torch_uvm.max_memory_allocated(DEVICE)
        torch_uvm.enable(optimizer="deferred")
        for ours, reference in zip(train(int(0.6 * peak)), expected, strict=True):
            assert torch.equal(ours, reference)

    def test_evicted_after_each_operator(self) -> None:
        expected = train(None, steps=2)
        _C.evict_after_operators(True)
        try:
            for ours, reference in zip(train(64 * MIB, steps=2), expected, strict=True):
                assert torch.equal(ours, reference)
        finally:
            _C.evict_after_operators(False)

    def test_two_threads(self) -> None:
        begin(48 * MIB)
        wrong: list[str] = []

        def work(value: float) -> None:
            xs = [
                torch.full((MIB // 2,), value, device="emu") for _ in range(10)
            ]  # 20 MiB, and as much for results
            for _ in range(10):
                for x in xs:
                    if not bool((x + 1 == value + 1).all()):
                        wrong.append(f"{value}")

        threads = [threading.Thread(target=work, args=(float(value),)) for value in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and _C.check_residency() is None

    def test_delayed_work(self, spawn: Spawn) -> None:
        """Under schedules that delay copies, a map or an unmap at the wrong time shows."""
        program = """
            import torch, torch_uvm
            torch_uvm.enable(budget="24MiB")
            torch.manual_seed(0)
            device = torch.accelerator.current_accelerator()
            weights = [torch.randn(512, 1024, device=device) for _ in range(20)]
            host = [each.cpu() for each in weights]
            addresses = [each.data_ptr() for each in weights]
            for step in range(6):
                for index, each in enumerate(weights):
                    each.mul_(0.5).add_(index)
                    host[index].mul_(0.5).add_(index)
                    assert torch.equal((each + 1).cpu(), host[index] + 1)
                torch_uvm.step()
            assert [each.data_ptr() for each in weights] == addresses
            figures = torch_uvm.residency_stats()
            assert figures["failures"] == 0 and figures["fetched"]["count"] > 0
        """
        for seed in range(4):
            conf = f"segments:stable,stable_min:1MiB,emulated_schedule_seed:{seed}"
            spawn(program, env={"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": conf})


def press() -> None:
    """Uses twice the budget of 16 MiB."""
    others = [torch.ones(MIB // 2, device="emu") for _ in range(16)]
    for other in others:
        other.add_(1)


@pytest.fixture
def small_budget() -> None:
    begin(16 * MIB)


@pytest.mark.usefixtures("small_budget")
class TestAddresses:
    def test_a_held_address_is_good_while_the_storage_is_resident(self) -> None:
        x = torch.ones(MIB // 2, device="emu")
        address = x.data_ptr()
        press()
        assert torch_uvm.residency(x) == {torch.device("cpu"): x.nbytes}
        with torch_uvm.resident(x):
            ctypes.c_float.from_address(address).value = 7.0
        press()
        assert x[0].item() == 7 and x[1].item() == 1 and x.data_ptr() == address

    def test_an_address_that_is_asked_for_has_memory(self) -> None:
        x = torch.ones(MIB // 2, device="emu")
        press()
        assert ctypes.c_float.from_address(x.data_ptr()).value == 1
        assert torch_uvm.residency(x) == {DEVICE: x.nbytes}

    def test_exports_pin(self) -> None:
        x = torch.ones(MIB // 2, device="emu")
        press()
        exported = torch.utils.dlpack.from_dlpack(x.__dlpack__())
        press()
        assert exported.data_ptr() == x.data_ptr() and torch_uvm.residency(x) == {DEVICE: x.nbytes}

    def test_a_storage_is_freed_on_either_side(self) -> None:
        others = torch_uvm.memory_reserved(DEVICE)  # tensors of tests before may be alive
        for evicted in (False, True):
            x = torch.ones(MIB // 2, device="emu")
            if evicted:
                press()
            del x
        gc.collect()
        torch_uvm.empty_cache()
        assert torch_uvm.memory_reserved(DEVICE) == others

    def test_small_storages_and_those_by_name_are_managed(self) -> None:
        small, large = torch.ones(1000, device="emu"), torch.ones(MIB, device="emu")
        by_name = torch_uvm.ones(MIB, device="emu")
        copy = torch_uvm.to(large, "cpu", copy=True)
        assert np.array_equal(copy.numpy(), np.ones(MIB, np.float32))
        for managed in (small, by_name):
            assert torch_uvm.to(managed, "cpu").data_ptr() == managed.data_ptr()

    @pytest.mark.parametrize(
        "move", [lambda x: torch_uvm.to(x, "cpu"), lambda x: x.to("cpu", managed=True)], ids=["to", "managed"]
    )
    def test_moves_to_another_processor_are_refused(
        self, move: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        x = torch.ones(MIB, device="emu")
        with pytest.raises(RuntimeError, match="segments:stable.*managed copy"):
            move(x)
        assert torch_uvm.to(x, DEVICE).data_ptr() == x.data_ptr()
        assert torch.equal(x.cpu(), torch.ones(MIB))

    def test_exports_as_managed_memory_are_refused(self) -> None:
        with pytest.raises(BufferError, match="segments:stable"):
            torch.ones(MIB, device="emu").__dlpack__(dl_device=(13, 0))  # type: ignore[arg-type]

    def test_hints_do_nothing(self) -> None:
        x = torch.ones(MIB, device="emu")
        torch_uvm.prefetch(x, "cpu")
        torch_uvm.advise(x, preferred_location="cpu")
        torch_uvm.discard(x)
        assert bool((x == 1).all()) and torch_uvm.residency(x) == {DEVICE: x.nbytes}
        assert emulated.residency(x) == {DEVICE: x.nbytes}

    def test_arenas_take_managed_memory(self) -> None:
        with torch_uvm.arena("4MiB"):
            x = torch.ones(MIB // 4, device="emu")
        assert torch_uvm.to(x, "cpu").data_ptr() == x.data_ptr()


@torch.library.custom_op("torch_uvm_tests::captured", mutates_args=())
def captured(x: torch.Tensor) -> int:
    """Captures a graph of which only this operator's operand is known."""
    graph = _C.begin_capture()
    _C.end_capture(graph)
    return graph


@torch.library.custom_op("torch_uvm_tests::launched", mutates_args=())
def launched(x: torch.Tensor, graph: int, address: int) -> float:
    """Launches a graph, which reads a float."""
    assert _C.enter_launch(graph) is None
    torch.accelerator.synchronize()
    return ctypes.c_float.from_address(address).value


@pytest.mark.usefixtures("small_budget")
class TestLaunches:
    @pytest.fixture
    def x(self) -> torch.Tensor:
        return torch.ones(MIB // 2, device="emu")

    @pytest.fixture
    def graph(self, x: torch.Tensor) -> Iterator[int]:
        graph = captured(x)
        yield graph
        _C.release_capture(graph)

    def test_a_launch_brings_the_bytes_back(self, x: torch.Tensor, graph: int) -> None:
        address = x.data_ptr()
        for _ in range(3):
            press()
            assert torch_uvm.residency(x) == {torch.device("cpu"): x.nbytes}
            region = _C.enter_launch(graph)
            assert region is not None
            assert torch_uvm.residency(x) == {DEVICE: x.nbytes}
            torch.accelerator.synchronize()  # the graph's work would wait for the fetch
            assert ctypes.c_float.from_address(address).value == 1
            _C.leave_region(region, None)

    def test_a_launch_within_an_operator(self, x: torch.Tensor, graph: int) -> None:
        address = x.data_ptr()
        press()
        assert launched(torch.ones(MIB, device="emu"), graph, address) == 1
        assert torch_uvm.residency(x) == {DEVICE: x.nbytes} and _C.check_residency() is None

    @pytest.fixture
    def full(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Evicts x, and takes all of the device's memory."""
        press()
        gc.collect()
        torch_uvm.empty_cache()
        assert torch_uvm.residency(x) == {torch.device("cpu"): x.nbytes}
        with torch_uvm.disabled():
            balloon = torch.empty(torch.accelerator.get_memory_info()[0], dtype=torch.uint8, device="emu")
        yield balloon
        balloon.untyped_storage().resize_(0)
        torch.accelerator.empty_cache()

    def test_without_device_memory_pinned_memory_is_used(
        self, x: torch.Tensor, graph: int, full: torch.Tensor
    ) -> None:
        address = ctypes.c_float.from_address(x.data_ptr())
        for launch in range(3):
            region = _C.enter_launch(graph)
            assert region is not None and torch_uvm.residency(x) == {torch.device("cpu"): x.nbytes}
            torch.accelerator.synchronize()
            assert address.value == 1 + launch
            address.value += 1  # as the graph's kernels would
            _C.leave_region(region, None)
        full.untyped_storage().resize_(0)
        torch.accelerator.empty_cache()
        region = _C.enter_launch(graph)
        assert region is not None and torch_uvm.residency(x) == {DEVICE: x.nbytes}
        _C.leave_region(region, None)
        assert float(x[0]) == 4 and bool((x[1:] == 1).all()) and _C.check_residency() is None

    def test_without_a_mapping_nothing_is_launched(
        self, x: torch.Tensor, graph: int, full: torch.Tensor
    ) -> None:
        _C.emu_fail_call("map", 1)
        with pytest.raises(torch.OutOfMemoryError, match="that a captured graph uses"):
            _C.enter_launch(graph)
        assert _C.emu_clear_failures() == 0
        full.untyped_storage().resize_(0)
        torch.accelerator.empty_cache()
        region = _C.enter_launch(graph)
        assert region is not None and torch_uvm.residency(x) == {DEVICE: x.nbytes}
        _C.leave_region(region, None)
        assert bool((x == 1).all()) and _C.check_residency() is None

    def test_its_updates_are_not_deferred(self, steps_at_once_afterwards: None) -> None:
        torch_uvm.enable(budget=16 * MIB, optimizer="deferred")
        parameters = [nn.Parameter(torch.ones(MIB // 2, device="emu")) for _ in range(2)]
        graph = captured(parameters[0].detach())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        optimizer.step()
        assert _C.pending_updates() == 1
        _C.release_capture(graph)


class TestBudgets:
    def test_lifting_the_budget_brings_everything_back(self) -> None:
        begin(16 * MIB)
        xs = [torch.full((MIB // 2,), float(value), device="emu") for value in range(16)]
        addresses = [x.data_ptr() for x in xs]
        torch_uvm.set_budget(None)
        assert [x.data_ptr() for x in xs] == addresses
        torch_uvm.set_budget(8 * MIB)
        for value, x in enumerate(xs):
            assert bool((x == value).all())
        assert torch_uvm.memory_reserved(DEVICE) <= 8 * MIB

    def test_without_a_budget_nothing_changes(self) -> None:
        begin(None)
        x = torch.ones(MIB, device="emu")
        assert torch_uvm.to(x, "cpu").data_ptr() == x.data_ptr()

    def test_operands_that_do_not_fit_are_used_in_pinned_memory(self) -> None:
        begin(12 * MIB)
        layer = nn.Linear(1024, 1024).to("emu")  # 4 MiB
        x = torch.ones(2048, 1024, device="emu")  # 8 MiB
        addresses = [layer.weight.data_ptr(), x.data_ptr()]
        assert torch.equal(
            layer(x).cpu(), nn.functional.linear(x.cpu(), layer.weight.cpu(), layer.bias.cpu())
        )
        stats = torch_uvm.residency_stats()
        assert stats["over_budget"] > 0 and stats["used_in_place"]["bytes"] > 0
        assert [layer.weight.data_ptr(), x.data_ptr()] == addresses
        del x
        assert _C.check_residency() is None
