"""Moves under the transforms of torch.func."""

# Wrong arguments are the point of some tests; torch has no stub for `managed=`.
# mypy: disable-error-code="call-overload, no-any-return"

from __future__ import annotations

import pytest
import torch
from _managed_tensors import CPU, managed, managed_copy, to_cpu
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torch_uvm

EMU = torch.device("emu:0")


class TestFunctionTransforms:
    def test_grad_of_grad(self) -> None:
        def cubes(x: torch.Tensor) -> torch.Tensor:
            return to_cpu(x).pow(3).sum()

        x = managed(4)
        first = grad(cubes)(x)
        second = grad(lambda x: grad(cubes)(x).sum())(x)
        assert (first.device, second.device) == (EMU, EMU)
        assert torch.equal(first.cpu(), 3 * x.cpu() ** 2)
        assert torch.equal(second.cpu(), 6 * x.cpu())

    def test_vjp_and_jvp(self) -> None:
        x, v = managed(4), managed(4)
        value, back, *_ = vjp(lambda x: to_cpu(x).sin(), x)
        assert torch.equal(value, x.cpu().sin())
        assert torch.equal(back(v.cpu())[0].cpu(), v.cpu() * x.cpu().cos())
        value, tangent, *_ = jvp(lambda x: to_cpu(x).sin(), (x,), (v,))
        assert torch.equal(value, x.cpu().sin())
        assert torch.equal(tangent, v.cpu() * x.cpu().cos())

    def test_jacobians(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return to_cpu(x).pow(3)

        x = managed(3)
        expected = torch.diag(3 * x.cpu() ** 2)
        assert torch.equal(jacrev(function)(x).cpu(), expected)
        with torch_uvm.enabled():  # tangents must be managed
            assert torch.equal(jacfwd(function)(x).cpu(), expected)
            second = hessian(lambda x: function(x).sum())(x)
            assert torch.equal(second.cpu(), torch.diag(6 * x.cpu()))

    @pytest.mark.parametrize("dim", [0, 1])
    def test_vmap_shares_the_bytes(self, dim: int) -> None:
        x = managed(3, 4)
        y = vmap(to_cpu, in_dims=dim, out_dims=dim)(x)
        assert (y.device, y.data_ptr(), y.shape) == (CPU, x.data_ptr(), x.shape)
        y.zero_()
        assert x.sum().item() == 0

    def test_vmap_and_grad_together(self) -> None:
        def squares(row: torch.Tensor) -> torch.Tensor:
            return to_cpu(row).square().sum()

        x = managed(3, 4)
        assert torch.equal(vmap(grad(squares))(x), 2 * x)
        assert torch.equal(grad(lambda x: vmap(squares)(x).sum())(x), 2 * x)
        assert vmap(vmap(to_cpu))(x).data_ptr() == x.data_ptr()

    @pytest.mark.parametrize("form", [torch.preserve_format, torch.contiguous_format])
    def test_vmap_of_copies(self, form: torch.memory_format) -> None:
        x = managed(3, 4)
        y = vmap(lambda r: torch_uvm.to(r, "cpu", copy=True, memory_format=form), in_dims=1, out_dims=1)(x)
        assert torch.equal(y, x.cpu()) and torch_uvm.is_managed(y) and y.data_ptr() != x.data_ptr()

    def test_vmap_of_a_copy_in_another_order_is_refused(self) -> None:
        with pytest.raises(ValueError, match="channels_last under vmap"):
            vmap(lambda r: managed_copy(r, CPU, torch.float32, False, torch.channels_last))(
                managed(2, 3, 4, 5, 6)
            )

    def test_functional_call_with_moved_weights(self) -> None:
        layer, x = nn.Linear(3, 2), torch.randn(4, 3)
        weights = {name: p.detach().to("emu", managed=True) for name, p in layer.named_parameters()}

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            moved = {name: torch_uvm.to(w, x.device) for name, w in weights.items()}
            return functional_call(layer, moved, (x,)).square().sum()

        expected = torch.autograd.grad(layer(x).square().sum(), tuple(layer.parameters()))
        gradients = grad(loss)(weights, x)
        assert all(g.device == EMU for g in gradients.values())
        assert all(torch.equal(g.cpu(), e) for g, e in zip(gradients.values(), expected, strict=True))
        each = vmap(grad(loss), in_dims=(None, 0))(weights, x)
        for name, of_all in gradients.items():
            assert torch.allclose(each[name].sum(0).cpu(), of_all.cpu(), atol=1e-5)

    def test_is_managed_sees_through_wrappers(self) -> None:
        seen: list[bool] = []

        def look(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch_uvm.is_managed(x))
            return x.sum()

        for x, expected in ((managed(3, 4), True), (torch.ones(3, 4), False)):
            seen.clear()
            vmap(look)(x)
            grad(look)(x)
            vmap(grad(look))(x)
            grad(lambda x: vmap(look)(x).sum())(x)
            assert seen == [expected] * 4
