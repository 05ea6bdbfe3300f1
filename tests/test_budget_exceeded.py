"""Batches, operators and results that are larger than the budget, and a budget at the host's limit."""

from __future__ import annotations

import pytest
import torch
from _budget_programs import (
    DEVICE,
    MIB,
    OPTIMIZERS,
    mlp,
    no_budget_afterwards,  # noqa: F401  (every test has it)
    run,
    training,
    vectors,
)
from _spawn import Spawn

import torch_uvm


class TestLargerThanTheBudget:
    def test_a_batch_four_times_the_usual_once(self) -> None:
        """With "auto", a soft budget, the step completes with the same results."""
        program = training(mlp, vectors, steps=6, sizes=[128, 128, 512, 128], **OPTIMIZERS["adamw foreach"])
        expected, _ = run(program, None)
        torch_uvm.enable(budget="auto")
        results, _ = run(program, "auto")  # type: ignore[arg-type]
        assert all(map(torch.equal, results, expected))

    def test_an_operator_that_exceeds_a_hard_budget_alone(self) -> None:
        """The operator uses its operands on the host, where that is possible."""

        def program() -> list[torch.Tensor]:
            parts = [torch.full((MIB,), float(i), device="emu") for i in range(4)]  # 16 MiB
            for _ in range(3):
                torch._foreach_add_(parts, 1.0)
            return parts

        expected, _ = run(program, None)
        results, figures = run(program, 10 * MIB)
        assert all(map(torch.equal, results, expected))
        assert figures["resident"] <= 10 * MIB >= figures["peak_device_bytes"][DEVICE]
        assert figures["used_in_place"]["count"] > 0

    def test_a_result_that_exceeds_a_hard_budget(self) -> None:
        """A result must be on the device: making it exceeds the budget, and the excess is counted."""
        torch_uvm.memory.empty_cache()
        torch_uvm.enable(budget=8 * MIB)
        torch_uvm.memory.reset_residency_stats()
        kept = [torch.full((MIB // 2,), float(i), device="emu") for i in range(6)]
        assert torch_uvm.stats()["over_budget"] == 0
        assert (torch.ones(4, MIB, device="emu") == 1).all().item()  # 16 MiB
        assert torch_uvm.stats()["over_budget"] > 0
        for number, each in enumerate(kept):
            assert (each == number).all().item()
        assert torch_uvm.stats()["device_bytes"][DEVICE] <= 8 * MIB

    def test_by_what_a_lower_budget_cannot_evict(self) -> None:
        """Pinned storages stay, and the excess is counted at once."""
        torch_uvm.enable(budget=16 * MIB)
        pinned = torch.ones(2 * MIB, device="emu")
        with torch_uvm.resident(pinned):
            torch_uvm.memory.reset_residency_stats()
            torch_uvm.set_budget(20 * MIB)
            assert torch_uvm.stats()["over_budget"] == 0
            torch_uvm.set_budget(4 * MIB)
            assert torch_uvm.stats()["device_bytes"][DEVICE] > 4 * MIB
            assert torch_uvm.stats()["over_budget"] == 1
        torch_uvm.set_budget(4 * MIB)
        assert torch_uvm.stats()["device_bytes"][DEVICE] <= 4 * MIB
        assert torch_uvm.stats()["over_budget"] == 1

    def test_a_result_beside_a_pin_is_created_on_the_host(self, spawn: Spawn) -> None:
        """If neither the budget nor the device has room for it. It moves to the device when there is."""
        spawn(
            """
            import torch, torch_uvm
            MIB = 1024**2
            torch_uvm.emulated.configure(memory=64 * MIB)
            torch_uvm.enable()
            kept = torch_uvm.keep_resident(pinned := torch.ones(12 * MIB, device="emu"))  # 48 of 60 MiB
            before = torch.full((MIB,), 2.0, device="emu")
            result = torch.full((4 * MIB,), 3.0, device="emu") * before.repeat(4)  # 16 MiB each
            stats = torch_uvm.stats()
            assert stats["over_budget"] > 0 and max(stats["peak_device_bytes"].values()) <= 60 * MIB
            assert (result == 6).all().item() and (before == 2).all().item() and (pinned == 1).all().item()
            assert torch_uvm.is_managed(result)
            device, host = torch.device("emu:0"), torch.device("cpu")
            assert torch_uvm.residency(result) == {host: result.nbytes}
            kept.release()
            result += 1
            assert torch_uvm.residency(result) == {device: result.nbytes} and (result == 7).all().item()
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )

    def test_an_operator_that_asks_for_temporary_bytes_twice(self, spawn: Spawn) -> None:
        """With a result in between, as cuDNN's backward of an LSTM does."""
        spawn(
            """
            import torch, torch_uvm
            MIB = 1024**2
            torch_uvm.emulated.configure(memory=68 * MIB)
            torch_uvm.enable()

            def use(x, mib):
                return torch.full((mib * MIB // 4,), x[0].item(), device="emu").sum()

            def twice(x):
                first = use(x, 24)
                result = x[: 3 * MIB] * 2  # 12 MiB
                return result + (use(x, 24) - first)

            library = torch.library.Library("uvm_test_places", "DEF")
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", twice, "CompositeExplicitAutograd")
            x = torch.full((4 * MIB,), 3.0, device="emu")
            others = [torch.ones(2 * MIB, device="emu") for _ in range(6)]
            for _ in range(20):
                torch._foreach_add_(others[:3], 1)
                torch._foreach_add_(others[3:], 1)
                assert (torch.ops.uvm_test_places.twice(x) == 6).all().item()
                torch_uvm.step()
            assert torch_uvm.stats()["over_budget"] <= 1  # before its needs are known
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )

    @pytest.mark.parametrize("pinned", [0.3, 3])  # MiB
    def test_an_operator_beside_a_pin_exceeds_every_hard_budget(self, spawn: Spawn, pinned: float) -> None:
        spawn(
            """
            import sys, torch, torch_uvm
            MIB = 1024**2
            torch_uvm.emulated.configure(memory=64 * MIB)
            for budget in (8, 10, 12, 18, 24, 42):
                torch_uvm.enable(budget=budget * MIB)
                torch_uvm.memory.reset_residency_stats()
                pinned = torch.ones(int(float(sys.argv[1]) * MIB) // 4, device="emu")
                kept = torch_uvm.keep_resident(pinned)
                parts = [torch.full((3 * MIB // 4,), 4.0, device="emu") for _ in range(8)]
                results = torch._foreach_sqrt(parts)  # 48 MiB with its operands
                assert torch_uvm.stats()["over_budget"] > 0 or budget == 42, budget
                assert all((it == 2).all().item() for it in results), budget
                kept.release()
                del pinned, parts, kept, results
                torch_uvm.memory.empty_cache()
            """,
            args=[str(pinned)],
            env={"TORCH_UVM_DEVICE": "emu"},
        )

    def test_at_the_hosts_limit(self, spawn: Spawn) -> None:
        """Evictions fail at the host's limit: the call raises out of memory, and contents on the device stay
        right."""
        spawn(
            """
            import torch, torch_uvm
            MIB = 1024**2
            torch_uvm.enable(budget=64 * MIB)
            kept = []
            try:
                for number in range(100):
                    kept.append(torch.full((MIB,), float(number), device="emu"))  # 4 MiB each
            except torch.OutOfMemoryError as error:
                assert "budget" in str(error), error
            assert (64 + 96) // 4 >= len(kept) > 64 // 4, len(kept)
            assert 0 < torch_uvm.stats()["host_bytes"] <= 96 * MIB
            kept.pop()  # operators on the other tensors need room too
            for number, each in enumerate(kept):
                assert (each == number).all().item(), number
            del kept
            torch_uvm._C.set_option("host_limit", "none")
            kept = [torch.ones(MIB, device="emu") for _ in range(60)]
            """,
            env={"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": "host_limit:96MiB"},
        )
