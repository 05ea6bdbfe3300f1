"""Moves under fake tensors, make_fx, functionalisation, torch.jit.trace and torch.export."""

# wrong arguments are the point of some tests; torch has no stub for `managed=`.
# mypy: disable-error-code="call-overload, no-any-return"

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _managed_tensors import CPU, managed, to_copy, to_cpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_uvm

EMU = torch.device("emu:0")
move = torch.ops.torch_uvm.move


class TestFakeTensors:
    def test_is_managed_is_false(self) -> None:
        x = managed(4)
        assert not torch_uvm.is_managed(torch.ones(3, device="meta"))
        assert not torch_uvm.is_managed(FakeTensorMode().from_tensor(x))
        assert not torch_uvm.is_managed(torch._to_functional_tensor(torch.ones(3)))

    @pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:, ::2], lambda x: x.t(), lambda x: x[0, 0]])
    def test_move_has_the_form_of_the_real_one(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = managed(3, 4)
        real = move(view(x), CPU)
        with FakeTensorMode() as mode:
            fake = move(view(mode.from_tensor(x)), CPU)
        assert (fake.device, fake.shape, fake.stride()) == (real.device, real.shape, real.stride())
        assert (fake.storage_offset(), fake.dtype) == (real.storage_offset(), real.dtype)

    def test_move_keeps_the_conjugate_bit(self) -> None:
        with FakeTensorMode():
            assert move(torch.ones(3, dtype=torch.complex64, device="emu").conj(), CPU).is_conj()

    def test_public_calls(self) -> None:
        real = managed(3, 4)
        with FakeTensorMode() as mode:
            x = mode.from_tensor(real)
            assert torch_uvm.to(x, "cpu").device == CPU
            assert x.t().to("cpu", managed=True).stride() == (1, 4)
            assert torch_uvm.to(torch.ones(3), "emu", torch.float64, managed=True).device == EMU

    @pytest.mark.parametrize("call", [lambda x: move(x, CPU), lambda x: to_copy(x, "cpu")])
    def test_meta_tensors_are_refused(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with pytest.raises(ValueError, match="meta"):
            call(torch.ones(3, device="meta"))


class TestRecorders:
    def test_make_fx_of_real_tensors_records_the_move(self) -> None:
        graph = make_fx(lambda x: to_cpu(x) * 2)(managed(3))
        assert "torch_uvm.move.default" in graph.code
        assert graph(managed(3)).tolist() == [2.0, 4.0, 6.0]

    def test_make_fx_of_fake_tensors_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match=r"cannot be recorded.*copy=True"):
            make_fx(lambda x: to_cpu(x) * 2, tracing_mode="fake")(managed(3))

    def test_functionalisation_refuses_the_move(self) -> None:
        with pytest.raises(RuntimeError, match="alias"):
            torch.func.functionalize(lambda x: move(x, CPU) * 2)(managed(3))

    def test_jit_trace_is_refused_by_name(self) -> None:
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace takes no operator with a device"):
            torch.jit.trace(to_cpu, (managed(3),))


class TestExport:
    class Model(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.options = options

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y.to("cpu", **self.options) if self.options else y

    @pytest.mark.parametrize("device", ["emu", "cpu"])
    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("options", [{}, {"managed": True, "copy": True}], ids=["plain", "functional"])
    def test_equal_results(self, device: str, strict: bool, options: dict[str, Any]) -> None:
        before = torch_uvm.memory.memory_allocated()
        model = torch_uvm.to(self.Model(**options), "emu", managed=True)
        torch_uvm.to(model, device)
        x = managed(3, 4, device=device)
        exported = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(exported.module()(x), model(x))
        self.empty(model)
        del exported, x
        gc.collect()
        assert torch_uvm.memory.memory_allocated() == before

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_move_is_refused(self, strict: bool) -> None:
        model = torch_uvm.to(self.Model(managed=True), "emu", managed=True)
        with pytest.raises(Exception, match=r"cannot be recorded in a graph.*copy=True"):
            torch.export.export(model, (managed(3, 4),), strict=strict)
        self.empty(model)

    @staticmethod
    def empty(model: nn.Module) -> None:
        """An export may keep the parameters as long as the process lives: they shall have no memory."""
        for parameter in model.parameters():
            parameter.data = torch.empty(0)
