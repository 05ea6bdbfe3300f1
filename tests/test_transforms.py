"""Moves under autograd, torch.func, fake tensors and recorders, and the functional form, managed_copy."""

# wrong arguments are the point of some tests; torch has no stub for `managed=`.
# mypy: disable-error-code="call-overload, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import torch_uvm

EMU = torch.device("emu:0")
CPU = torch.device("cpu")
managed_copy = torch.ops.torch_uvm.managed_copy
move = torch.ops.torch_uvm.move


def managed(*size: int, device: str = "emu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(size).numel()
    return torch_uvm.empty(*size, device=device, dtype=dtype).copy_(torch.arange(count).reshape(size) + 1)


def to_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch_uvm.to(x, "cpu")


class TestViews:
    """What autograd makes of a write in place, by which label and in which mode."""

    def test_base_written_under_no_grad(self) -> None:
        """An optimizer's step between the move and its use: as for PyTorch's views, the new values count."""
        x = managed(4).requires_grad_()
        y = to_cpu(x)
        with torch.no_grad():
            x.mul_(2)
        (y * y).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [4.0, 8.0, 12.0, 16.0]

    def test_base_that_gets_a_gradient_by_a_write(self) -> None:
        x = managed(4)
        y = to_cpu(x)
        w = torch.ones(4, device="emu", requires_grad=True)
        x.mul_(w * 3)
        y.sum().backward()
        assert w.grad is not None and w.grad.tolist() == [3.0, 6.0, 9.0, 12.0]

    def test_base_that_is_a_non_leaf_written_in_place(self) -> None:
        with torch_uvm.enabled():
            x = managed(4).requires_grad_() * 1
        y = to_cpu(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified inplace"):
            y.sum().backward()

    def test_view_that_gets_a_gradient_by_a_write(self) -> None:
        """Right where autograd's own memory is managed; an error in backward where it is not."""
        for enabled in (True, False):
            with torch_uvm.enabled() if enabled else torch_uvm.disabled():
                x, w = managed(4), torch.ones(4, requires_grad=True)
                to_cpu(x).mul_(w * 3)
                assert x.requires_grad
                if enabled:
                    x.sum().backward()
                    assert w.grad is not None and w.grad.tolist() == [3.0, 6.0, 9.0, 12.0]
                else:
                    with pytest.raises(ValueError, match="write through the tensor that was moved"):
                        x.sum().backward()

    @pytest.mark.parametrize("leaf", [True, False])
    def test_view_made_under_no_grad(self, leaf: bool) -> None:
        with torch_uvm.enabled():
            x = managed(4).requires_grad_()
            x = x if leaf else x * 1
        with torch.no_grad():
            y, of_torch = to_cpu(x), x.view(-1)
            assert y.requires_grad == of_torch.requires_grad
            y.add_(1)  # as for PyTorch's views
        assert x.detach().tolist() == [2.0, 3.0, 4.0, 5.0]
        for view in (y, of_torch):
            with pytest.raises(RuntimeError, match="no_grad mode"):
                view.add_(1)

    def test_inference_mode(self) -> None:
        x = managed(4)
        with torch.inference_mode():
            y, of_torch, made_inside = to_cpu(x), x.view(-1), to_cpu(managed(4))
            y.add_(1)
        assert x.tolist() == [2.0, 3.0, 4.0, 5.0]
        assert (y.is_inference(), of_torch.is_inference(), made_inside.is_inference()) == (False, False, True)
        w = torch.ones(4, requires_grad=True)
        for view in (y, of_torch):
            with pytest.raises(RuntimeError, match="inference mode"):
                view.add_(w.to(view.device))
        assert torch_uvm.to(made_inside, "emu").is_inference()

    def test_saved_tensors_notice_writes_by_either_label(self) -> None:
        for write_base in (True, False):
            x = managed(4)
            y = to_cpu(x)
            w = torch.ones(4, requires_grad=True)
            loss = (w * y).sum()
            (x if write_base else y).zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_a_move_of_a_view_of_a_move(self) -> None:
        x = managed(4, 2).requires_grad_()
        y = torch_uvm.to(to_cpu(x)[1:3].t(), "emu")
        assert y._base is x
        assert y.data_ptr() == x[1:3].data_ptr()
        (y * y).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[0.0, 0.0], [6.0, 8.0], [10.0, 12.0], [0.0, 0.0]]


class TestBackward:
    def test_double_moves_retained_gradients_and_hooks(self) -> None:
        x = managed(3).requires_grad_()
        y = to_cpu(x)
        z = torch_uvm.to(y, "emu")
        y.retain_grad()
        seen: list[torch.Tensor] = []
        z.register_hook(seen.append)
        (z * torch.tensor([1.0, 2.0, 3.0]).to("emu")).sum().backward()
        assert x.grad is not None and y.grad is not None
        assert (x.grad.device, y.grad.device, seen[0].device) == (EMU, CPU, EMU)
        x.grad.zero_()  # nobody else's gradient
        assert y.grad.tolist() == seen[0].tolist() == [1.0, 2.0, 3.0]

    def test_gradient_that_two_inputs_share_is_not_shared_by_them(self) -> None:
        x = managed(4, device="cpu").requires_grad_()
        b = torch.ones(4, device="emu", requires_grad=True)
        with torch_uvm.enabled():
            (torch_uvm.to(x, "emu") + b).mul(2).sum().backward()
        assert x.grad is not None and b.grad is not None
        x.grad.zero_()
        assert b.grad.tolist() == [2.0] * 4

    def test_gradient_goes_back_as_a_move_where_it_is_managed(self) -> None:
        x = managed(4, device="cpu").requires_grad_()
        with torch_uvm.enabled():
            torch_uvm.to(x, "emu").mul(torch.full((4,), 2.0, device="emu")).backward(
                torch.ones(4, device="emu")
            )
        assert x.grad is not None
        assert (x.grad.device, x.grad.tolist()) == (CPU, [2.0] * 4)
        assert torch_uvm.is_managed(x.grad)

    def test_move_of_a_gradient(self) -> None:
        x = managed(4).requires_grad_()
        x.grad = managed(4)
        moved = to_cpu(x.grad)
        moved.zero_()
        assert moved.data_ptr() == x.grad.data_ptr() and x.grad.tolist() == [0.0] * 4

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointing(self, use_reentrant: bool) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return to_cpu(to_cpu(x).sin().to("emu", managed=True)).cos()

        x, twin = managed(4).requires_grad_(), managed(4, device="cpu").requires_grad_()
        checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
        twin.sin().cos().sum().backward()
        assert x.grad is not None and twin.grad is not None
        assert torch.equal(x.grad.cpu(), twin.grad)

    def test_leaf_identity(self) -> None:
        x = managed(4).requires_grad_()
        y = to_cpu(x)
        assert x.is_leaf and not y.is_leaf and y._base is x
        assert y.grad_fn is not None and y.grad_fn.name() == "torch_uvm::MoveBackward"
        assert to_cpu(x.detach()).is_leaf


class TestForwardMode:
    def test_write_to_the_base_is_seen_in_the_tangent(self) -> None:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(managed(4), managed(4))
            y = to_cpu(dual)
            dual.mul_(3)
            assert forward_ad.unpack_dual(y).tangent.tolist() == [3.0, 6.0, 9.0, 12.0]

    def test_write_to_the_view_is_seen_in_the_tangent(self) -> None:
        with torch_uvm.enabled(), forward_ad.dual_level():
            x = managed(4)
            to_cpu(x).mul_(forward_ad.make_dual(torch.ones(4), torch.ones(4)))
            assert forward_ad.unpack_dual(x).tangent.tolist() == [1.0, 2.0, 3.0, 4.0]

    def test_tangent_that_is_not_managed_is_refused(self) -> None:
        with pytest.raises(ValueError, match="tangent is not managed"):
            jvp(to_cpu, (managed(4),), (torch.ones(4, device="emu"),))


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
        with torch_uvm.enabled():  # the tangents have to be managed
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


def to_copy(x: torch.Tensor, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    result: torch.Tensor = managed_copy(
        x, torch.device(device), dtype or x.dtype, False, torch.preserve_format
    )
    return result


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


class TestManagedCopy:
    """The functional form."""

    SAMPLES = (
        (lambda: torch.randn(3, 4), "emu", torch.float32),
        (lambda: torch.randn(3, 4).t(), "emu", torch.float64),
        (lambda: managed(3, 4), "cpu", torch.float32),
        (lambda: managed(3, 4)[1:, ::2], "cpu", torch.bfloat16),
        (lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "emu", torch.float32),
        (lambda: torch.randn(3, 4, requires_grad=True), "emu", torch.float32),
        (lambda: torch.randn(3, dtype=torch.complex64, requires_grad=True), "cpu", torch.complex128),
        (lambda: torch.arange(5), "cpu", torch.int32),
        (lambda: torch.randn(2, 1).expand(2, 3), "emu", torch.float32),
        (lambda: torch.randn(0, 3), "emu", torch.float32),
        (lambda: torch.tensor(3.0), "emu", torch.float32),
        (lambda: torch.tensor([True, False]), "emu", torch.bool),
    )

    @pytest.mark.parametrize(("make", "device", "dtype"), SAMPLES)
    @pytest.mark.parametrize("form", [torch.preserve_format, torch.contiguous_format], ids=str)
    def test_opcheck(
        self, make: Callable[[], torch.Tensor], device: str, dtype: torch.dtype, form: torch.memory_format
    ) -> None:
        for non_blocking in (False, True):
            opcheck(managed_copy.default, (make(), torch.device(device), dtype, non_blocking, form))

    @pytest.mark.parametrize(("make", "device", "dtype"), SAMPLES)
    def test_is_what_to_makes(
        self, make: Callable[[], torch.Tensor], device: str, dtype: torch.dtype
    ) -> None:
        x = make()
        y, of_torch = to_copy(x, device, dtype), x.to(device, dtype, copy=True)
        assert torch_uvm.is_managed(y) or x.numel() == 0
        assert (y.device, y.dtype, y.stride()) == (of_torch.device, dtype, of_torch.stride())
        assert torch.equal(y.cpu(), of_torch.cpu())
        assert y.requires_grad == x.requires_grad

    @pytest.mark.parametrize(("source", "target"), [("cpu", "emu"), ("emu", "cpu"), ("emu", "emu")])
    def test_gradients(self, source: str, target: str) -> None:
        x = torch.rand(3, dtype=torch.float64).to(source).requires_grad_()

        def function(x: torch.Tensor) -> torch.Tensor:
            return to_copy(x, target).sin()

        assert torch.autograd.gradcheck(function, (x,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, (x,))

    def test_gradient_has_the_dtype_of_the_input(self) -> None:
        x = torch.ones(3, requires_grad=True)
        to_copy(x, "emu", torch.complex64).abs().sum().backward()
        assert x.grad is not None and (x.grad.dtype, x.grad.device) == (torch.float32, CPU)
        assert not to_copy(x, "emu", torch.int32).requires_grad

    @pytest.mark.parametrize(
        ("make", "device", "dtype", "message"),
        [
            (lambda: torch.eye(3).to_sparse_csr(), "cpu", torch.float32, "strided|SparseCsr"),
            (lambda: torch.ones(3), "meta", torch.float32, "meta"),
            (lambda: torch.ones(3), "emu:7", torch.float32, "emu:7"),
            (lambda: torch.ones(3), "cpu", torch.qint8, "qint8|QInt8"),
        ],
    )
    def test_bad_input(
        self, make: Callable[[], torch.Tensor], device: str, dtype: torch.dtype, message: str
    ) -> None:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            managed_copy(make(), torch.device(device), dtype, False, torch.preserve_format)


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
        model = torch_uvm.to(self.Model(**options), "emu", managed=True)
        torch_uvm.to(model, device)
        x = managed(3, 4, device=device)
        exported = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(exported.module()(x), model(x))

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_move_is_refused(self, strict: bool) -> None:
        model = torch_uvm.to(self.Model(managed=True), "emu", managed=True)
        with pytest.raises(Exception, match=r"cannot be recorded in a graph.*copy=True"):
            torch.export.export(model, (managed(3, 4),), strict=strict)
