"""`enable(optimizer="deferred")` gives the bits of immediate steps, for every optimizer and every budget.

Each program runs twice on the emulated accelerator: without a budget and with immediate steps, and under a
hard budget with deferred steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _deferred import (
    BUDGET,
    DEVICE,
    MIB,
    OPTIMIZERS,
    assert_deferred_bits,
    assert_equal,
    backward,
    batch,
    everything,
    mlp,
    on_cpu,
    stepped,
    versions,
)
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")


def trained(name: str, width: int = 512) -> tuple[list[torch.Tensor], list[int], int]:
    """Losses, parameters and state after some steps, their versions, and the most pending updates."""
    torch.manual_seed(0)
    model = mlp(width)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses, most = [], 0
    for _ in range(7):
        loss = model(torch.randn(32, width).to("emu")).square().mean()
        loss.backward()
        optimizer.step()
        most = max(most, _C.pending_updates())
        optimizer.zero_grad()
        losses.append(loss)
    return on_cpu([*losses, *everything(model, optimizer)]), versions(model, optimizer), most


class TestBits:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_equal_at_every_budget(self, name: str) -> None:
        torch_uvm.enable(budget=None)
        torch_uvm.memory.empty_cache()
        torch_uvm.memory.reset_peak_memory_stats()
        wanted, counted, most = trained(name)
        assert most == 0
        used = torch_uvm.memory.max_memory_allocated(DEVICE)
        for part in (1.5, 4):
            budget = int(used / part)
            torch_uvm.enable(budget=budget, optimizer="deferred")
            torch_uvm.memory.reset_residency_stats()
            torch_uvm.memory.reset_peak_memory_stats()
            found, found_versions, most = trained(name)
            assert_equal(found, wanted)
            assert found_versions == counted
            assert most == 4
            figures = torch_uvm.stats()
            assert figures["failures"] == 0
            assert figures["written_back"]["bytes"] > 0
            if figures["over_budget"] == 0:
                assert figures["peak_device_bytes"][DEVICE] <= budget
            assert _C.check_residency() is None
            torch_uvm.enable(budget=None, optimizer="in_place")

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_small_parameters_are_updated_together(self, name: str) -> None:
        torch_uvm.enable(budget=None, optimizer="in_place")
        wanted, counted, _most = trained(name, 256)
        torch_uvm.enable(budget=256 * MIB, optimizer="deferred")
        found, found_versions, most = trained(name, 256)
        assert most == 1  # of four weights
        assert_equal(found, wanted)
        assert found_versions == counted

    def test_moments_that_are_used_in_place(self) -> None:
        """As those of an update at the step. Before a schedule has an update, each that is on the host is."""

        def train() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp(768, 8)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for _ in range(6):
                model(torch.randn(32, 768).to("emu")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return on_cpu(everything(model, optimizer))

        assert_deferred_bits(train, 20 * MIB)
        assert torch_uvm.stats()["used_in_place"]["count"] > 0

    def test_numbers_that_can_leave_the_device(self, evicting: None) -> None:
        """They are updated during the step, while operators are recorded."""
        torch_uvm.enable(optimizer="deferred")
        parameter = nn.Parameter(torch.ones(512, 512, device="emu"))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.NAdam([parameter], foreach=True)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())  # moves this product to the device
        product = optimizer.state[parameter]["mu_product"]
        assert product.device == DEVICE
        for _ in range(3):
            _C.evict_after_operators(False)
            before = product.item()  # fetches it: both copies are valid
            optimizer.step()
            assert _C.pending_updates() == 1
            _C.evict_after_operators(True)
            torch.ones(1, device="emu")  # evicts it
            assert product.item() < before


# --- steps with hooks and closures, and accumulated, scaled or clipped gradients


class TestSteps:
    def test_hooks_run_at_the_step(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        seen: list[tuple[str, int]] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(("before", _C.pending_updates())))
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", _C.pending_updates())))
        backward(model)
        optimizer.step()
        assert seen == [("before", 0), ("after", 4)]

    def test_a_closure(self) -> None:
        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizer = OPTIMIZERS["sgd"](model.parameters())

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                return backward(model)

            losses: list[Any] = [optimizer.step(closure) for _ in range(4)]  # type: ignore[arg-type]
            return on_cpu([*losses, *model.parameters()])

        assert_deferred_bits(program)

    def test_a_gradient_accumulated_over_batches(self) -> None:
        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizer = OPTIMIZERS["adamw fused"](model.parameters())
            for step in range(9):
                backward(model)
                if step % 3 == 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step < 6)
            return on_cpu(everything(model, optimizer))

        assert_deferred_bits(program)

    def test_a_scaled_gradient_accumulated_and_clipped(self) -> None:
        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
            scaler = torch.amp.GradScaler("emu", init_scale=256.0, growth_interval=2)
            norms, pending = [], set()
            for step in range(12):
                loss = model(batch()).square().mean() / 2
                scaler.scale(loss * (float("inf") if step == 4 else 1.0)).backward()
                if step % 2 == 1:
                    scaler.unscale_(optimizer)
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
                    scaler.step(optimizer)
                    pending.add(_C.pending_updates())
                    scaler.update()
                    optimizer.zero_grad(set_to_none=step < 6)
            assert pending == ({0, 4} if torch_uvm._patches.deferred_updates.chosen() == "deferred" else {0})
            return on_cpu([*norms, scaler.get_scale(), *everything(model, optimizer)])

        torch_uvm.enable(budget=None)
        wanted = program()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        found = program()
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other) or (one.isnan().all() and other.isnan().all())

    def test_parameters_of_two_optimizers(self) -> None:
        """Each optimizer writes parameters with pending updates of the other, and one of them only a
        subset."""

        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizers = [
                OPTIMIZERS["adamw fused"](model.parameters()),
                OPTIMIZERS["sgd momentum"](list(model.parameters())[:4]),
            ]
            for step in range(6):
                backward(model)
                optimizers[step % 2].step()
                optimizers[1 - step % 2].step()
                if step % 3 != 1:
                    optimizers[0].zero_grad()
            return on_cpu([*everything(model, optimizers[0]), *everything(model, optimizers[1])])

        assert_deferred_bits(program)

    @pytest.mark.parametrize("name", ["adamw fused", "adamw foreach", "adamw loop", "sgd momentum"])
    @pytest.mark.parametrize("common", [False, True], ids=["own gradients", "a common gradient"])
    def test_parameters_of_two_types(self, name: str, common: bool) -> None:
        """PyTorch updates each type in a group of its own, whose parameters are no neighbours."""

        def program() -> tuple[list[torch.Tensor], int]:
            torch.manual_seed(0)
            types = [torch.float32, torch.bfloat16] * 3
            parameters = [nn.Parameter(torch.randn(512, 1024, dtype=each).to("emu")) for each in types]
            optimizer = OPTIMIZERS[name](parameters)
            most = 0
            for _ in range(4):
                gradients = {each: torch.randn(512, 1024, dtype=each).to("emu") for each in types}
                for parameter in parameters:
                    gradient = gradients[parameter.dtype]
                    parameter.grad = gradient if common else gradient * parameter.detach()
                optimizer.step()
                most = max(most, _C.pending_updates())
            state = [value for each in optimizer.state.values() for value in each.values()]
            return on_cpu([*parameters, *filter(torch.is_tensor, state)]), most

        torch_uvm.enable(budget=None)
        wanted, _ = program()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        found, most = program()
        assert_equal(found, wanted)
        assert most == 6

    def test_under_modes_of_the_thread_that_looks(self) -> None:
        """The update does not run under the accessing thread's modes: autocast, inference, default device,
        hooks on saved tensors."""

        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
            results = []
            for _ in range(3):
                with torch.autocast("emu", torch.bfloat16), torch.device("cpu"):
                    loss = model(batch()).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.inference_mode(), torch.autocast("emu", torch.bfloat16):
                    results.append(model(batch()).float())
            return on_cpu([*results, *everything(model, optimizer)])

        assert_deferred_bits(program)


class TestOptions:
    def test_the_environment(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            assert torch_uvm._patches.deferred_updates.chosen() == "deferred"
            model = torch.nn.Linear(1024, 1024).to("emu")
            optimizer = torch.optim.SGD(model.parameters())
            model(torch.ones(2, 1024, device="emu")).sum().backward()
            optimizer.step()
            assert torch_uvm._C.pending_updates() == 1
            torch_uvm.enable(budget="1GiB")  # leaves the optimizer option unchanged
            assert torch_uvm._patches.deferred_updates.chosen() == "deferred"
            torch_uvm.enable(optimizer="in_place")
            assert torch_uvm._patches.deferred_updates.chosen() == "in_place"
            """,
            env={
                "TORCH_UVM": "1",
                "TORCH_UVM_DEVICE": "emu",
                "TORCH_UVM_CONF": "optimizer:deferred,budget:64MiB",
            },
        )

    def test_the_command_line(self, spawn: Spawn) -> None:
        script = spawn.folder / "script.py"
        script.write_text("import torch_uvm\nprint(torch_uvm._patches.deferred_updates.chosen())\n")
        done = spawn(args=["-m", "torch_uvm", "run", "--optimizer", "deferred", str(script)])
        assert done.stdout.strip() == "deferred"
        done = spawn(args=["-m", "torch_uvm", "run", "--optimizer", "later", str(script)], check=False)
        assert done.returncode == 2
        assert 'optimizer: "later"' in done.stderr

    @pytest.mark.parametrize(
        ("wrong", "error"), [("later", ValueError), (True, TypeError), (None, TypeError)]
    )
    def test_invalid_arguments_are_refused(self, wrong: Any, error: type[Exception]) -> None:
        torch_uvm.enable(optimizer="deferred")
        with pytest.raises(error, match=r'optimizer.*accepted: "in_place", "deferred" or "auto"'):
            torch_uvm.enable(optimizer=wrong)
        assert torch_uvm._patches.deferred_updates.chosen() == "deferred"
