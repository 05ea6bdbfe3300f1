"""Steps that cannot be deferred, or whose results might then differ, run immediately with unchanged
results."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

import pytest
import torch
from _deferred import (
    BUDGET,
    MIB,
    OPTIMIZERS,
    Make,
    Optimizer,
    assert_equal,
    backward,
    batch,
    bytes_at,
    everything,
    first,
    mlp,
    on_cpu,
    stepped,
)
from torch import nn

import torch_uvm
from torch_uvm import _C

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")


@torch.library.custom_op("torch_uvm_tests::captured", mutates_args=())
def captured(x: torch.Tensor) -> int:
    """Captures a graph of which only this operator's operand is known."""
    graph = _C.begin_capture()
    _C.end_capture(graph)
    return graph


class TestNotDeferred:
    """Updates that cannot be deferred, or whose bits might change, run in the step. Results equal immediate
    steps."""

    @staticmethod
    def check(program: Callable[[], tuple[Optimizer, list[torch.Tensor]]], pending: int = 0) -> None:
        torch_uvm.enable(budget=None, optimizer="in_place")
        torch.manual_seed(0)
        wanted = on_cpu(program()[1])
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        torch.manual_seed(0)
        _optimizer, results = program()
        assert _C.pending_updates() == pending
        assert_equal(on_cpu(results), wanted)

    def steps(
        self, make: Make, model: Callable[[], nn.Module] = mlp
    ) -> Callable[[], tuple[Optimizer, list[torch.Tensor]]]:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            trained = model()
            optimizer = make(trained.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                backward(trained)
                optimizer.step()
                assert _C.pending_updates() == 0
            return optimizer, everything(trained, optimizer)

        return program

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
            lambda p: torch.optim.ASGD(p, lr=0.01),
            lambda p: torch.optim.Rprop(p, lr=0.01),
        ],
        ids=["rate in a tensor", "ASGD", "Rprop"],
    )
    def test_unsupported_optimizers(self, make: Make) -> None:
        self.check(self.steps(make))

    def test_small_parameters(self) -> None:
        self.check(self.steps(OPTIMIZERS["adamw foreach"], lambda: nn.Sequential(*mlp(512, 1)[2:])))  # type: ignore[index]

    def test_without_a_budget(self) -> None:
        torch_uvm.enable(budget=None, optimizer="deferred")
        stepped()
        assert _C.pending_updates() == 0

    def test_with_an_idle_engine(self) -> None:
        torch_uvm.enable(budget="auto", optimizer="deferred")
        stepped()
        assert _C.pending_updates() == 0

    def test_with_the_switch_off(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        with torch_uvm.disabled():
            backward(model)
            optimizer.step()
            assert _C.pending_updates() == 0

    def test_profile_with_stacks(self) -> None:
        """It reads addresses of parameters and moments, as each call of a module or a step begins."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            model, optimizer = stepped()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
                for _ in range(2):
                    assert _C.pending_updates() == 0
                    backward(model)
                    optimizer.step()
            backward(model)
            optimizer.step()
            return optimizer, everything(model, optimizer)

        self.check(program, pending=4)

    def test_differentiable(self) -> None:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            leaf = torch.randn(512, 512).to("emu").requires_grad_()
            x = leaf.clone()
            optimizer = torch.optim.SGD([x], lr=0.5, differentiable=True)
            x.grad = leaf * 3
            optimizer.step()
            x.square().sum().backward()
            assert leaf.grad is not None
            return optimizer, [x, leaf.grad]

        self.check(program)

    def test_complex_parameters(self) -> None:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            x = torch.randn(300, 300, dtype=torch.complex64).to("emu").requires_grad_()
            optimizer = torch.optim.Adam([x], foreach=True)
            for _ in range(3):
                optimizer.zero_grad()
                (x * x.conj()).real.sum().backward()
                optimizer.step()
            return optimizer, [x]

        self.check(program)

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_beside_a_sparse_gradient(self, momentum: float) -> None:
        """PyTorch updates such a group in a loop. The sparse gradient is on the CPU."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            rows, model = nn.Embedding(1024, 512, sparse=True), mlp()
            optimizer = torch.optim.SGD([*model.parameters(), rows.weight], lr=0.1, momentum=momentum)
            for step in range(3):
                optimizer.zero_grad()
                model(rows(torch.arange(step, step + 32)).to("emu")).square().mean().backward()
                assert rows.weight.grad is not None and rows.weight.grad.is_sparse
                optimizer.step()
            return optimizer, [rows.weight, *model.parameters()]

        self.check(program)

    def test_foreach_kernels_on_their_slow_path(self) -> None:
        """One gradient with other strides sends the whole list to the slow path."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            model = mlp()
            optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
            backward(model)
            gradient = first(model).grad
            assert gradient is not None
            first(model).grad = gradient.t().contiguous().t()
            optimizer.step()
            return optimizer, everything(model, optimizer)

        self.check(program)

    def test_parameters_that_share_their_bytes(self) -> None:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            flat = torch.randn(4, 512, 512).to("emu")
            parameters = [nn.Parameter(part) for part in flat]
            optimizer = torch.optim.AdamW(parameters, foreach=True)
            for _ in range(2):
                torch.stack([p.square().sum() for p in parameters]).sum().backward()
                optimizer.step()
            return optimizer, [flat]

        self.check(program)

    def test_gradients_that_share_their_bytes(self) -> None:
        """Gradients are views of one bucket, as with DistributedDataParallel. They are only read."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            parameters = [nn.Parameter(torch.randn(512, 512).to("emu")) for _ in range(3)]
            optimizer = torch.optim.AdamW(parameters, fused=True)
            bucket = torch.randn(3, 512, 512).to("emu")
            for parameter, part in zip(parameters, bucket, strict=True):
                parameter.grad = part
            optimizer.step()
            bucket.zero_()
            optimizer.step()
            return optimizer, [*parameters]

        self.check(program, pending=3)

    @pytest.mark.parametrize("same", [True, False], ids=["a tensor", "views"])
    def test_a_common_gradient_that_the_step_writes(self, same: bool) -> None:
        """SGD with nesterov, in its foreach implementation: it writes all gradients, then all parameters."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            parameters = [nn.Parameter(torch.randn(512, 512).to("emu")) for _ in range(2)]
            optimizer = OPTIMIZERS["sgd nesterov"](parameters)
            for _ in range(3):
                gradient = torch.randn(512, 512).to("emu")
                for parameter in parameters:
                    parameter.grad = gradient if same else gradient.view_as(parameter)
                optimizer.step()
            return optimizer, [*parameters, gradient]

        self.check(program)

    def test_pinned_parameters(self) -> None:
        """The address of a pinned parameter may have escaped."""
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        model, optimizer = stepped()
        with torch_uvm.resident(first(model)):
            before = bytes_at(first(model).data_ptr(), first(model))
            backward(model)
            held = first(model).data_ptr()
            optimizer.step()
            assert _C.pending_updates() == 3
            after = bytes_at(held, first(model))
            assert not torch.equal(before, after)
            assert torch.equal(after, bytes_at(first(model).data_ptr(), first(model)))

    def test_captured_parameters(self) -> None:
        """A graph's kernels read a captured parameter at its address."""
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        model, optimizer = stepped()
        graph = captured(first(model).detach())
        held = first(model).data_ptr()
        before = bytes_at(held, first(model))
        backward(model)
        optimizer.step()
        assert _C.pending_updates() == 3
        _C.note_launch(graph)
        after = bytes_at(held, first(model))
        assert not torch.equal(before, after)
        assert torch.equal(after, bytes_at(first(model).data_ptr(), first(model)))
        _C.release_capture(graph)

    def test_parameters_with_a_cpu_label(self) -> None:
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        model, optimizer = stepped()
        here = torch_uvm.to(first(model).detach(), "cpu")
        backward(model)
        before = here.clone()
        optimizer.step()
        assert _C.pending_updates() == 3
        torch.accelerator.synchronize()
        assert not torch.equal(here, before)

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_gradient_scaler(self, fused: bool) -> None:
        """A fused step gets the scale and the overflow flag. Other steps are skipped after an overflow."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            model = mlp()
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            scaler = torch.amp.GradScaler("emu", init_scale=1024.0, growth_interval=2)
            for step in range(5):
                optimizer.zero_grad()
                loss = model(batch()).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            return optimizer, [*everything(model, optimizer), torch.tensor(scaler.get_scale())]

        self.check(program, pending=0 if fused else 4)

    def test_functional_optimizers(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        x, gradient = torch.ones(512, 512, device="emu"), torch.ones(512, 512, device="emu")
        run = threading.Thread(  # a thread that has not run an optimizer step
            target=lambda: importlib.import_module("torch.optim.sgd").sgd(
                [x], [gradient], [], lr=1.0, momentum=0, dampening=0, nesterov=False, maximize=False,
                weight_decay=0, foreach=True,
            )
        )  # fmt: skip
        run.start()
        run.join()
        assert _C.pending_updates() == 0
        assert x.sum().item() == 0
