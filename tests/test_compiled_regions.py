"""Compiled graphs under a budget: kernels that read and write by address, which no operator announces.

Inductor has no kernels for the emulated accelerator. The calls are its own (`CompiledFxGraph`); what is
called reads the addresses of its inputs once, as Triton's launcher does, and uses them later.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # all of what a call of CompiledFxGraph looks at
from _spawn import Spawn
from torch._inductor.output_code import CompiledFxGraph

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
BUDGET = 8 * MIB
DEVICE = torch.device("emu", 0)
N = MIB // 4  # elements of a storage of 1 MiB

Kernel = Callable[[list[Any]], Any]


@pytest.fixture(autouse=True)
def small_budget() -> Iterator[None]:
    torch_uvm.empty_cache()
    torch_uvm.reset_peak_memory_stats()
    torch_uvm.enable(budget=BUDGET)
    torch_uvm.reset_residency_stats()
    yield
    gc.collect()
    _C.request_budget(None, None)
    torch_uvm.empty_cache()


def address(x: torch.Tensor) -> int:
    """As C++ reads it: nobody is told."""
    plain: Any = torch.Tensor.data_ptr
    return int(getattr(plain, "__wrapped__", plain)(x))


def floats(at: int, count: int = N) -> Any:
    """For a kernel, which comes after what its stream has queued."""
    torch.accelerator.synchronize()
    return (ctypes.c_float * count).from_address(at)


def graph(kernel: Kernel, written: Sequence[int] = (), backward: bool = False) -> CompiledFxGraph:
    """A compiled graph that runs `kernel`, and says that it writes to these inputs."""
    made = object.__new__(CompiledFxGraph)
    made.current_callable = kernel
    made.compiled_fn_runner = None
    made.mutated_input_idxs = torch.utils._ordered_set.OrderedSet(written)
    made.fx_kwargs = {"is_backward": backward}
    return made


def storages(count: int = 12) -> list[torch.Tensor]:
    """More than the budget holds, each full of its number; what is on the device has a copy on the host."""
    made = [torch.full((N,), float(number), device=DEVICE) for number in range(count)]
    for _ in range(2):
        for each in made:
            each.sum()
    return made


def use(tensors: list[torch.Tensor]) -> None:
    """Brings them to the device one by one; what they take the place of has to leave."""
    for each in tensors:
        each.sum()


def on_host(x: torch.Tensor) -> bool:
    return torch.device("cpu") in torch_uvm.residency(x)


class TestInputs:
    def test_stay_where_they_are_until_the_call_returns(self) -> None:
        kept = storages()
        seen = []

        def kernel(inputs: list[Any]) -> Any:
            before = [address(x) for x in inputs]
            use(kept)  # operators of the graph
            seen.append(before == [address(x) for x in inputs])
            assert not any(on_host(x) for x in inputs)
            values = [floats(at)[7] for at in before]
            return (torch.full((N,), sum(values), device=DEVICE),)

        call = graph(kernel)
        for first in range(0, 12, 3):
            (result,) = call([kept[first], kept[(first + 5) % 12]])
            assert (result == first + (first + 5) % 12).all().item()
            use(kept)
        assert all(seen)
        assert _C.check_residency() is None

    def test_can_leave_after_it(self) -> None:
        kept = storages()
        call = graph(lambda inputs: (inputs[0] + 1,))
        for _ in range(3):
            for each in kept:
                call([each])
        stats = torch_uvm.residency_stats()
        assert stats["fetched"]["count"] > 12 and stats["over_budget"] == 0
        assert stats["peak_device_bytes"][DEVICE] <= BUDGET

    def test_what_is_written_is_not_lost(self) -> None:
        """A copy on the host from before would be taken for the newest."""
        kept = storages()

        def kernel(inputs: list[Any]) -> Any:
            there = floats(address(inputs[1]))
            there[0] += 100.0
            there[N - 1] += inputs[0].numel()
            return ()

        call = graph(kernel, written=[1])
        for turn in range(1, 4):
            for number, each in enumerate(kept):
                use([each])
                call([kept[(number + 1) % 12], each])
            use(kept)
            for number, each in enumerate(kept):
                assert each[0].item() == number + 100.0 * turn
                assert each[N - 1].item() == number + float(N) * turn

    def test_what_is_only_read_is_dropped_without_a_copy(self) -> None:
        kept = storages()
        call = graph(lambda inputs: ())
        for _ in range(4):
            for each in kept:
                call([each])
        stats = torch_uvm.residency_stats()
        assert stats["written_back"]["count"] <= 12, "each once since it was made"
        assert stats["dropped_clean"]["count"] > 12

    def test_a_backward_may_write_to_all_but_parameters(self) -> None:
        """It reuses the memory of what was saved for it."""
        kept = [torch.nn.Parameter(each) if each[0] < 6 else each for each in storages()]

        def kernel(inputs: list[Any]) -> Any:
            for each in inputs:
                if not isinstance(each, torch.nn.Parameter):
                    floats(address(each))[3] = -1.0
            return ()

        call = graph(kernel, backward=True)
        with torch.no_grad():
            for number in range(6):
                use([kept[number], kept[6 + number]])
                before = torch_uvm.residency_stats()["written_back"]["count"]
                call([kept[number], kept[6 + number]])
                use(kept)
                assert torch_uvm.residency_stats()["written_back"]["count"] <= before + 1
            assert [each[3].item() for each in kept] == [0, 1, 2, 3, 4, 5] + 6 * [-1]

    def test_of_a_graph_that_says_nothing_all_count_as_written(self) -> None:
        kept = storages()

        def kernel(inputs: list[Any]) -> Any:
            for each in inputs:
                floats(address(each))[3] = -1.0
            return ()

        call = graph(kernel)
        del call.mutated_input_idxs
        for number in range(0, 12, 2):
            use(kept[number : number + 2])
            call(kept[number : number + 2])
        use(kept)
        assert all(each[3].item() == -1 for each in kept)

    def test_may_be_freed_inside(self) -> None:
        """A call empties its list of inputs, so that what is used up makes room."""
        allocated: list[int] = []

        def kernel(inputs: list[Any]) -> Any:
            (x,) = inputs
            inputs.clear()
            before = torch_uvm.memory_allocated(DEVICE)
            del x
            allocated.append(before - torch_uvm.memory_allocated(DEVICE))
            return (torch.ones(N, device=DEVICE),)

        call = graph(kernel)
        inputs = [torch.full((N,), 2.0, device=DEVICE)]
        (result,) = call(inputs)
        assert allocated == [MIB] and inputs == []
        kept = storages()
        use(kept)
        assert result.sum().item() == N
        assert _C.check_residency() is None

    def test_constants_are_held_too(self) -> None:
        kept = storages()
        constant = kept[4]

        def kernel(inputs: list[Any]) -> Any:
            before = address(constant)
            assert not on_host(constant)
            use(kept)
            assert address(constant) == before
            return (torch.full((N,), floats(before)[9], device=DEVICE),)

        class Constants:
            @staticmethod
            def unwrap(made: CompiledFxGraph) -> dict[str, Any]:
                return {"constant": constant, "number": 3}

        call = graph(kernel)
        from torch_uvm._patches import compiled_graphs

        compiled_graphs._noting_constants(lambda *arguments: None)(call, (), Constants(), {})
        for _ in range(3):
            (result,) = call([kept[0]])
            assert result[5].item() == 4
            use(kept)


class TestCalls:
    def test_outputs_leave_like_any_other(self) -> None:
        call = graph(lambda inputs: (torch.full((N,), 7.0, device=DEVICE), None, 3))
        results = [call([torch.ones(N, device=DEVICE)])[0] for _ in range(12)]
        assert any(on_host(each) for each in results)
        assert all((each == 7).all().item() for each in results)
        assert torch_uvm.residency_stats()["peak_device_bytes"][DEVICE] <= BUDGET

    def test_that_raise_let_go(self) -> None:
        kept = storages()

        def kernel(inputs: list[Any]) -> Any:
            raise ArithmeticError("on purpose")

        call = graph(kernel)
        for each in kept:
            with pytest.raises(ArithmeticError, match="on purpose"):
                call([each])
        for _ in range(2):
            use(kept)
        assert any(on_host(each) for each in kept)
        assert [each[0].item() for each in kept] == list(range(12))
        assert torch_uvm.residency_stats()["over_budget"] == 0

    def test_within_another(self) -> None:
        kept = storages()
        inner = graph(lambda inputs: (inputs[0] + 1,))

        def kernel(inputs: list[Any]) -> Any:
            before = address(inputs[0])
            (result,) = inner([kept[3]])
            use(kept)
            assert floats(before)[0] == inputs[0][0].item() and address(inputs[0]) == before
            return (result,)

        outer = graph(kernel)
        for each in kept:
            (result,) = outer([each])
            assert result[0].item() == 4
        use(kept)

    def test_in_backward_threads(self) -> None:
        kept = storages()
        call = graph(lambda inputs: (inputs[0] * inputs[1],), backward=True)

        class Compiled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(factor)
                return x * factor

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
                (factor,) = ctx.saved_tensors
                (result,) = call([gradients[0], factor])
                return result, None

        for number in range(12):
            x = torch.ones(N, device=DEVICE, requires_grad=True)
            applied: Any = Compiled.apply  # untyped in torch
            applied(x, kept[number]).sum().backward()
            assert x.grad is not None and (x.grad == number).all().item()
        assert _C.check_residency() is None

    def test_in_four_threads_at_once(self) -> None:
        failures: list[BaseException] = []

        def kernel(inputs: list[Any]) -> Any:
            source, target = address(inputs[0]), address(inputs[1])
            torch.ones(N, device=DEVICE).sum()
            there, here = floats(target), floats(source)
            there[0] += here[0]
            return ()

        call = graph(kernel, written=[1])

        def work(number: int) -> None:
            try:
                one, total = (torch.full((N,), value, device=DEVICE) for value in (float(number), 0.0))
                for _ in range(30):
                    call([one, total])
                assert total[0].item() == 30 * number
            except BaseException as error:
                failures.append(error)

        kept = storages()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [each[0].item() for each in kept] == list(range(12))

    def test_are_steps_of_a_plan(self) -> None:
        kept = storages()
        calls = [graph(lambda inputs: ()) for _ in range(6)]
        torch_uvm.reset_residency_stats()
        for _ in range(10):
            for number, call in enumerate(calls):
                call(kept[2 * number : 2 * number + 2])
            torch_uvm.step()
        stats = torch_uvm.residency_stats()
        assert stats["plan_hits"] > stats["plan_misses"]


class TestLargerThanTheBudget:
    @pytest.mark.parametrize("budget", [BUDGET, "auto"])
    def test_inputs_are_used_on_the_host(self, budget: int | str) -> None:
        """Those that do not fit: reads and writes go to where they are."""
        if budget == "auto":
            torch_uvm.set_budget(None)
        kept = storages()
        torch_uvm.set_budget(budget)
        use(kept)

        def kernel(inputs: list[Any]) -> Any:
            for at in [address(x) for x in inputs]:
                floats(at)[1] += 1000.0
            return ()

        call = graph(kernel, written=range(12))
        torch_uvm.reset_residency_stats()
        torch_uvm.reset_peak_memory_stats()
        for _ in range(3):
            call(list(kept))
        stats = torch_uvm.residency_stats()
        if budget == BUDGET:
            assert stats["used_in_place"]["count"] >= 12 and stats["over_budget"] == 3
            assert stats["peak_device_bytes"][DEVICE] <= BUDGET
        use(kept)
        assert [each[1].item() for each in kept] == [number + 3000.0 for number in range(12)]

    def test_what_is_between_kernels_may_exceed_it(self) -> None:
        """It has no other place; counted, and given back."""
        kept = storages()

        def kernel(inputs: list[Any]) -> Any:
            # Memory that no operator has seen: inductor's buffers.
            buffers = [torch.empty(0, device=DEVICE) for _ in range(9)]
            for each in buffers:
                each.untyped_storage().resize_(MIB)
            return (inputs[0] + 1,)

        call = graph(kernel)
        for number, each in enumerate(kept):
            (result,) = call([each])
            assert result[0].item() == number + 1
            del result
        assert torch_uvm.residency_stats()["over_budget"] > 0
        use(kept)
        assert torch_uvm.residency_stats()["device_bytes"][DEVICE] <= BUDGET


class TestInstallation:
    def test_imports_no_compiler(self, spawn: Spawn) -> None:
        spawn(
            """
            import sys
            import torch, torch_uvm
            torch_uvm.enable(budget="64MiB")
            torch.ones(1 << 20, device="emu").sum()
            assert "torch._inductor.output_code" not in sys.modules
            import torch._inductor.output_code as code
            assert "torch_uvm" in code.CompiledFxGraph.__call__.__module__
            assert "torch_uvm" in code.CompiledFxGraph.post_compile.__module__
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )

    def test_a_compiler_that_was_imported_before(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch._inductor.output_code as code
            import torch_uvm
            torch_uvm.enable()
            assert "torch_uvm" in code.CompiledFxGraph.__call__.__module__
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )

    def test_graphs_are_forgotten(self) -> None:
        from torch_uvm._patches import compiled_graphs

        call = graph(lambda inputs: ())
        call([torch.ones(N, device=DEVICE)])
        before = len(compiled_graphs._graphs)
        del call
        gc.collect()
        assert len(compiled_graphs._graphs) == before - 1


class TestBatchNorm:
    def test_writes_to_its_statistics_alone(self) -> None:
        """The schema says nothing of them; the input and the weights stay clean."""
        channels = N // 2
        weight, bias = (torch.nn.Parameter(torch.ones(channels, device=DEVICE)) for _ in range(2))
        mean, var = (torch.zeros(channels, device=DEVICE) for _ in range(2))
        x = torch.randn(2, channels, device=DEVICE)
        kept = storages()
        torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True)
        use(kept)
        expected = mean.clone(), var.clone()
        use(kept)
        with torch.no_grad():
            torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True)
        use(kept)  # statistics have left
        assert not torch.equal(mean, expected[0]) and not torch.equal(var, expected[1])
        torch.testing.assert_close(mean, expected[0] * 1.9)
        stats = torch_uvm.residency_stats()
        before = stats["written_back"]["bytes"]
        with torch.no_grad():
            result = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True)
        use([mean, var, weight, bias, x])
        del result
        use(kept)
        grown = torch_uvm.residency_stats()["written_back"]["bytes"] - before
        assert grown <= 2 * MIB, "the two statistics, of half a mebibyte each, and at most a temporary"
