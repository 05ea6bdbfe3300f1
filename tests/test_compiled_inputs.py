"""Inputs and constants of a compiled graph under a budget are pinned while its kernels run."""

from __future__ import annotations

from typing import Any

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
from torch._inductor.output_code import CompiledFxGraph

import torch_uvm
from torch_uvm import _C


class TestInputs:
    def test_are_pinned_until_the_call_returns(self) -> None:
        kept = storages()
        seen = []

        def kernel(inputs: list[Any]) -> Any:
            before = [address(x) for x in inputs]
            use(kept)  # other operators of the graph
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

    def test_can_be_evicted_afterwards(self) -> None:
        kept = storages()
        call = graph(lambda inputs: (inputs[0] + 1,))
        for _ in range(3):
            for each in kept:
                call([each])
        stats = torch_uvm.stats()
        assert stats["fetched"]["count"] > 12 and stats["over_budget"] == 0
        assert stats["peak_device_bytes"][DEVICE] <= BUDGET

    def test_writes_are_not_lost(self) -> None:
        """An older copy on the host must not count as clean after the kernel's write."""
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

    def test_inputs_that_are_only_read_are_evicted_without_a_copy(self) -> None:
        kept = storages()
        call = graph(lambda inputs: ())
        for _ in range(4):
            for each in kept:
                call([each])
        stats = torch_uvm.stats()
        assert stats["written_back"]["count"] <= 12, "each is written back once, after its creation"
        assert stats["dropped_clean"]["count"] > 12

    def test_launchers_that_ask_for_addresses_write_nothing(self) -> None:
        """Triton's launchers call data_ptr() for each pointer. Elsewhere the bytes count as written."""
        kept = storages()
        call = graph(lambda inputs: [each.data_ptr() for each in inputs][:0])
        for _ in range(8):
            for each in kept:
                call([each])
        stats = torch_uvm.stats()
        assert stats["fetched"]["count"] > 24
        written = stats["written_back"]["count"]
        assert written <= 12, "each is written back once, after its creation"
        for each in kept:
            each.sum()
            each.data_ptr()
        use(kept)
        assert torch_uvm.stats()["written_back"]["count"] > written

    def test_a_backward_may_write_to_all_but_parameters(self) -> None:
        """A backward graph reuses the memory of saved tensors."""
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
                before = torch_uvm.stats()["written_back"]["count"]
                call([kept[number], kept[6 + number]])
                use(kept)
                assert torch_uvm.stats()["written_back"]["count"] <= before + 1
            assert [each[3].item() for each in kept] == [0, 1, 2, 3, 4, 5] + 6 * [-1]

    def test_without_declared_writes_all_count_as_written(self) -> None:
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
        """A call empties its list of inputs, so that consumed inputs are freed early."""
        allocated: list[int] = []

        def kernel(inputs: list[Any]) -> Any:
            (x,) = inputs
            inputs.clear()
            before = torch_uvm.memory.memory_allocated(DEVICE)
            del x
            allocated.append(before - torch_uvm.memory.memory_allocated(DEVICE))
            return (torch.ones(N, device=DEVICE),)

        call = graph(kernel)
        empty = torch_uvm.memory.memory_allocated(DEVICE)
        inputs = [torch.full((N,), 2.0, device=DEVICE)]
        taken = torch_uvm.memory.memory_allocated(DEVICE) - empty
        (result,) = call(inputs)
        assert allocated == [taken] and taken >= MIB and inputs == []
        kept = storages()
        use(kept)
        assert result.sum().item() == N
        assert _C.check_residency() is None

    def test_constants_are_pinned_too(self) -> None:
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
