"""Moves under autograd: writes through views, backward, checkpointing and forward mode."""

# wrong arguments are the point of some tests; torch has no stub for `managed=`.
# mypy: disable-error-code="call-overload, no-any-return"

from __future__ import annotations

import itertools

import pytest
import torch
from _managed_tensors import CPU, managed, to_cpu
from torch import nn
from torch.autograd import forward_ad
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

import torch_uvm

EMU = torch.device("emu:0")


class TestViews:
    """Autograd and in-place writes, through each label and in each mode."""

    def test_base_written_under_no_grad(self) -> None:
        """An optimizer's step between the move and its use: the new values are used, as with PyTorch's
        views."""
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
        """Requires that autograd's own memory is managed. Otherwise backward raises."""
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
            assert y.requires_grad == of_torch.requires_grad and y.grad_fn is of_torch.grad_fn is None
            y.add_(1)  # as with PyTorch's views
        assert x.detach().tolist() == [2.0, 3.0, 4.0, 5.0]
        for view in (y, of_torch):
            with pytest.raises(RuntimeError, match="no_grad mode"):
                view.add_(1)

    def test_inference_mode(self) -> None:
        x = managed(4)
        with torch.inference_mode():
            y, of_torch, made_inside = to_cpu(x), x.view(-1), to_cpu(managed(4))
            y.add_(1)
        assert x.tolist() == [2.0, 3.0, 4.0, 5.0] and made_inside.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert (y.is_inference(), of_torch.is_inference(), made_inside.is_inference()) == (False, False, True)
        w = torch.ones(4, requires_grad=True)
        for view in (y, of_torch):
            with pytest.raises(RuntimeError, match="inference mode"):
                view.add_(w.to(view.device))
        assert torch_uvm.to(made_inside, "emu").is_inference()

    def test_saved_tensors_notice_writes_by_either_label(self) -> None:
        for saved, written in itertools.product((0, 1), repeat=2):
            both = (x := managed(4), to_cpu(x))
            w = torch.ones(4, device=both[saved].device, requires_grad=True)
            loss = (w * both[saved]).sum()
            both[written].zero_()
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
        x.grad.zero_()  # must not change y's gradient
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
        assert not isinstance(to_cpu(nn.Parameter(managed(4))), nn.Parameter)


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
