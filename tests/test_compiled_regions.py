"""Calls of compiled graphs under a budget: outputs, errors, threads, large inputs, installation."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # imports all that a call of CompiledFxGraph needs
from _compiled_graphs import (
    BUDGET,
    DEVICE,
    MIB,
    N,
    address,
    floats,
    graph,
    on_host,
    small_budget,  # noqa: F401  (every test has it)
    storages,
    use,
)
from _schedule_check import check_schedule
from _spawn import Spawn
from _threads import in_threads
from _traced_schedules import schedule_of

import torch_uvm
from torch_uvm import _C
from torch_uvm.traces import read_trace


class TestCalls:
    def test_outputs_are_evicted_like_other_storages(self) -> None:
        call = graph(lambda inputs: (torch.full((N,), 7.0, device=DEVICE), None, 3))
        results = [call([torch.ones(N, device=DEVICE)])[0] for _ in range(12)]
        assert any(on_host(each) for each in results)
        assert all((each == 7).all().item() for each in results)
        assert torch_uvm.stats()["peak_device_bytes"][DEVICE] <= BUDGET

    def test_that_raise_unpin_their_inputs(self) -> None:
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
        assert torch_uvm.stats()["over_budget"] == 0

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

        def kernel(inputs: list[Any]) -> Any:
            source, target = address(inputs[0]), address(inputs[1])
            torch.ones(N, device=DEVICE).sum()
            there, here = floats(target), floats(source)
            there[0] += here[0]
            return ()

        call = graph(kernel, written=[1])

        def work(number: int) -> None:
            one, total = (torch.full((N,), value, device=DEVICE) for value in (float(number), 0.0))
            for _ in range(30):
                call([one, total])
            assert total[0].item() == 30 * number

        kept = storages()
        in_threads(*(partial(work, number) for number in range(4)))
        assert [each[0].item() for each in kept] == list(range(12))

    def test_are_steps_of_a_plan(self) -> None:
        kept = storages()
        calls = [graph(lambda inputs: ()) for _ in range(6)]
        torch_uvm.memory.reset_residency_stats()
        for _ in range(10):
            for number, call in enumerate(calls):
                call(kept[2 * number : 2 * number + 2])
            torch_uvm.step()
        stats = torch_uvm.stats()
        assert stats["plan_hits"] > stats["plan_misses"]

    def test_each_is_one_operator_of_the_trace_and_of_the_schedule(self, tmp_path: Path) -> None:
        """Its inputs are its operands. Neither the operators that it calls nor its buffers are listed."""
        weights = storages(9)
        torch_uvm.step()

        def kernel(inputs: list[Any]) -> Any:
            buffer = inputs[0] + inputs[1]  # an operator, on a storage of the graph's own
            torch.add(buffer, 1, out=inputs[2])
            return (buffer * 2,)

        calls = [graph(kernel, written=[2]) for _ in range(3)]
        with torch_uvm.tools.record_accesses(tmp_path / "trace"):
            for _ in range(5):
                for number, call in enumerate(calls):
                    (result,) = call(weights[3 * number : 3 * number + 3])
                    result.sum()
                    del result
                torch_uvm.step()
        trace = read_trace(tmp_path / "trace")
        graphs = [each for each in trace.operators if each.name == "compiled graph"]
        assert [each.name for each in trace.operators if each not in graphs] == ["aten::sum"] * 15
        assert len(graphs) == 15
        for place, each in enumerate(graphs):
            assert (len(each.reads), len(each.writes), len(each.births)) == (2, 1, 1)
            assert (each.reads, each.writes) == (graphs[place % 3].reads, graphs[place % 3].writes)
        assert len({name for each in graphs[:3] for name in (*each.reads, *each.writes)}) == 9
        schedule = schedule_of(trace, 8 * MIB, step_ms=1.0)  # a graph takes five, and more with rounding
        assert [each.name for each in schedule.operators].count("compiled graph") == 3
        assert check_schedule(schedule) == []


class TestLargerThanTheBudget:
    @pytest.mark.parametrize("budget", [BUDGET, "auto"])
    def test_inputs_are_used_on_the_host(self, budget: int | str) -> None:
        """Inputs beyond the budget are read and written on the host."""
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
        torch_uvm.memory.reset_residency_stats()
        torch_uvm.memory.reset_peak_memory_stats()
        for _ in range(3):
            call(list(kept))
        stats = torch_uvm.stats()
        if budget == BUDGET:
            assert stats["used_in_place"]["count"] >= 12 and stats["over_budget"] == 3
            assert stats["peak_device_bytes"][DEVICE] <= BUDGET
        use(kept)
        assert [each[1].item() for each in kept] == [number + 3000.0 for number in range(12)]

    def test_buffers_between_kernels_may_exceed_it(self) -> None:
        """Buffers inside a graph exceed the budget. The excess is counted and later released."""
        kept = storages()

        def kernel(inputs: list[Any]) -> Any:
            # Stands for inductor's buffers, which are allocated without an operator.
            buffers = [torch.empty(0, device=DEVICE) for _ in range(9)]
            for each in buffers:
                each.untyped_storage().resize_(MIB)
            return (inputs[0] + 1,)

        call = graph(kernel)
        for number, each in enumerate(kept):
            (result,) = call([each])
            assert result[0].item() == number + 1
            del result
        assert torch_uvm.stats()["over_budget"] > 0
        use(kept)
        assert torch_uvm.stats()["device_bytes"][DEVICE] <= BUDGET


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
