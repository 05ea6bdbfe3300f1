"""Moves under autograd, repeated round trips, and moves of modules."""

# torch has no stub for `managed=`; a Sequential has items.
# mypy: disable-error-code="call-overload, index"

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import torch_uvm

EMU = torch.device("emu:0")


def managed(*size: int, device: str = "emu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(size).numel()
    return torch_uvm.memory.empty(*size, device=device, dtype=dtype).copy_(
        torch.arange(count).reshape(size) % 2
    )


class TestAutograd:
    def test_backward_moves_the_gradient_back(self) -> None:
        x = managed(4).requires_grad_()
        y = torch_uvm.to(x, "cpu")
        (y * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
        assert x.grad is not None
        assert (x.grad.device, x.grad.tolist()) == (EMU, [1.0, 2.0, 3.0, 4.0])

    @pytest.mark.parametrize("source", ["emu:0", "cpu"])
    def test_gradcheck_and_gradgradcheck(self, source: str) -> None:
        other = "cpu" if source == "emu:0" else "emu:0"
        x = torch_uvm.memory.empty(3, 2, device=source, dtype=torch.float64).copy_(torch.rand(3, 2))
        x.requires_grad_()

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch_uvm.to(torch_uvm.to(x, other).sin(), source, managed=True).square()

        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))

    @pytest.mark.parametrize("leaf", [True, False])
    def test_in_place_on_the_view_of_what_requires_grad_raises(self, leaf: bool) -> None:
        x = managed(4).requires_grad_()
        with torch_uvm.enabled():
            x = x if leaf else x * 1
        with pytest.raises(RuntimeError, match="view"):
            torch_uvm.to(x, "cpu").add_(1)

    def test_functional_call(self) -> None:
        layer = nn.Linear(3, 2)
        weights = {name: p.detach().to("emu", managed=True) for name, p in layer.named_parameters()}
        on_cpu = {name: torch_uvm.to(p, "cpu") for name, p in weights.items()}
        x = torch.randn(4, 3)
        assert torch.equal(torch.func.functional_call(layer, on_cpu, x), layer(x))


class TestGradients:
    """`.grad` of moved tensors, and moves of `.grad`."""

    def test_of_a_moved_leaf_is_on_the_leafs_device(self) -> None:
        x = managed(4).requires_grad_()
        torch_uvm.to(x, "cpu").sum().backward()
        (torch_uvm.to(x, "cpu") * 2).sum().backward()  # accumulates
        assert x.grad is not None
        assert (x.grad.device, x.grad.tolist()) == (EMU, [3.0] * 4)

    def test_can_be_moved_itself(self) -> None:
        with torch_uvm.enabled():
            x = managed(4).requires_grad_()
            (x * x).sum().backward()
        assert x.grad is not None
        on_cpu = torch_uvm.to(x.grad, "cpu")
        assert on_cpu.data_ptr() == x.grad.data_ptr()
        on_cpu.clamp_(max=1.0)
        assert x.grad.tolist() == [0.0, 1.0, 0.0, 1.0]


def there_and_back(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = torch_uvm.to(torch_uvm.to(x, "cpu"), "emu")
    return x


def steps_from_base(y: torch.Tensor) -> list[str]:
    """The operators that autograd replays to make the view `y` from its base."""
    steps: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            steps.append(str(func))
            return func(*args, **(kwargs or {}))

    assert y._base is not None
    with Record():  # type: ignore[no-untyped-call]
        again = y._view_func_unsafe(y._base)
    assert (again.device, again.shape, again.stride()) == (y.device, y.shape, y.stride())
    assert (again.data_ptr(), again.is_conj(), again.is_neg()) == (y.data_ptr(), y.is_conj(), y.is_neg())
    return steps


class TestRepeatedMoves:
    """Repeated round trips of a tensor do not lengthen the chain to its base."""

    @pytest.mark.parametrize(
        "form",
        [
            lambda x: x,
            lambda x: x.t()[1:],
            lambda x: x.detach(),
            lambda x: x.detach()[1:],
            lambda x: x.conj(),
            lambda x: x.conj().imag,
            lambda x: torch.view_as_real(x)[..., 1],
            lambda x: torch_uvm.to(x, "cpu").t(),
        ],
        ids=["base", "view", "detached", "view of detached", "conj", "neg", "real", "view of moved"],
    )
    def test_no_chain(self, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = managed(4, 6, dtype=torch.complex64)
        first = form(x)
        once, often = there_and_back(first, 1), there_and_back(first, 5000)
        assert often._base is once._base is not None
        assert steps_from_base(often) == steps_from_base(once)
        away = torch_uvm.to(often, "cpu")
        assert steps_from_base(away) == steps_from_base(torch_uvm.to(once, "cpu"))
        base = away._rev_view_func_unsafe(away)  # type: ignore[attr-defined]
        assert away._base is not None
        assert (base.device, base.shape, base.stride()) == (EMU, away._base.shape, away._base.stride())
        often.zero_()
        assert first.abs().sum().item() == 0 and first._version == often._version

    def test_views_between_the_moves_make_no_chain(self) -> None:
        x = y = managed(4, 6)
        for _ in range(50):
            y = torch_uvm.to(torch_uvm.to(y, "cpu").t(), "emu").t()
        away = torch_uvm.to(y, "cpu")
        assert away._base is x and len(steps_from_base(away)) <= 2

    def test_a_base_that_requires_grad_later(self) -> None:
        x = managed(4)
        y = there_and_back(x[1:], 3)
        w = torch.ones(4, device="emu", requires_grad=True)
        x.mul_(w * 3)
        torch_uvm.to(y, "cpu").sum().backward()
        assert w.grad is not None and w.grad.tolist() == [0.0, 3.0, 0.0, 3.0]

    def test_a_write_through_a_tensor_that_was_moved_back(self) -> None:
        x = managed(4)
        y = there_and_back(x[1:], 3)
        w = torch.ones(3, device="emu", requires_grad=True)
        y.mul_(w)
        (x * 2).sum().backward()
        assert w.grad is not None and w.grad.tolist() == [2.0, 0.0, 2.0]

    def test_a_leaf_that_requires_grad(self) -> None:
        x = managed(4).requires_grad_()
        y = there_and_back(x, 300)
        with pytest.raises(RuntimeError, match="view"):
            y.add_(1)
        (y * y).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [0.0, 2.0, 0.0, 2.0]

    def test_a_tangent(self) -> None:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(managed(4), managed(4))
            y = there_and_back(x[1:], 20)
            assert forward_ad.unpack_dual(y * 3).tangent.tolist() == [3.0, 0.0, 3.0]


@pytest.fixture
def swapping() -> Iterator[None]:
    """Modules swap their parameters with the converted ones instead of assigning to `.data`."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


class TestModules:
    def model(self) -> nn.Module:
        with torch_uvm.enabled():
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to("emu")
        model[2].weight = model[0].weight
        return model

    def test_parameters_keep_identity_ties_and_bytes(self) -> None:
        model = self.model()
        parameters = list(model.parameters())
        addresses = [t.data_ptr() for t in model.state_dict().values()]
        assert torch_uvm.to(model, "cpu") is model
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert [t.data_ptr() for t in model.state_dict().values()] == addresses
        assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
        assert model[2].weight is model[0].weight

    def test_gradients_hooks_and_optimizers_go_along(self) -> None:
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen: list[int] = []
        model[0].weight.register_hook(lambda g: seen.append(1))
        with torch_uvm.enabled():
            model(torch.randn(8, 4).to("emu")).sum().backward()
        torch_uvm.to(model, "cpu")
        weight = model[0].weight
        assert weight.grad is not None
        assert weight.grad.device.type == "cpu"
        held = optimizer.param_groups[0]["params"]
        assert len(held) == len(list(model.parameters()))
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        optimizer.step()
        model(torch.randn(8, 4)).sum().backward()
        assert len(seen) == 2

    def test_buffers_move_with_the_parameters(self) -> None:
        model = self.model()
        buffers = dict(model.named_buffers())
        assert {"1.running_mean", "1.num_batches_tracked"} <= set(buffers)
        torch_uvm.to(model, "cpu")
        for name, moved in model.named_buffers():
            assert (moved.device.type, moved.data_ptr()) == ("cpu", buffers[name].data_ptr())

    def test_dtype_is_for_floating_point_only(self) -> None:
        model = self.model()
        torch_uvm.to(model, "cpu", torch.float64)
        assert model[0].weight.dtype == torch.float64
        assert model[1].num_batches_tracked.dtype == torch.int64

    def test_buffers_are_no_views_of_their_previous_tensors(self) -> None:
        model = self.model()
        first = model[1].running_mean
        for _ in range(20):
            torch_uvm.to(torch_uvm.to(model, "cpu"), "emu")
            assert all(b._base is None for b in model.buffers())
            assert all(p._base is None and p.is_leaf for p in model.parameters())
        model[1].running_mean.add_(1)
        assert model[1].running_mean._version == first._version
        assert torch.equal(first.cpu(), model[1].running_mean.cpu())

    def test_buffers_with_a_history_keep_it(self) -> None:
        model, x = nn.Module(), managed(4).requires_grad_()
        with torch_uvm.enabled():
            model.register_buffer("moved", x * 2)
        torch_uvm.to(model, "cpu")
        model.moved.sum().backward()  # type: ignore[operator]
        assert x.grad is not None and x.grad.tolist() == [2.0] * 4

    @pytest.mark.usefixtures("swapping")
    def test_where_parameters_are_swapped(self) -> None:
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with torch_uvm.enabled():
            model(torch.randn(8, 4).to("emu")).sum().backward()
            optimizer.step()
        parameters = list(model.parameters())
        weight = model[0].weight
        address, gradient = weight.data_ptr(), weight.grad.data_ptr()
        values = weight.grad.tolist()
        for device in ("cpu", "emu:0", "cpu"):
            torch_uvm.to(model, device)
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            assert model[2].weight is model[0].weight is weight
            assert (weight.device, weight.data_ptr()) == (torch.device(device), address)
            assert (weight.grad.device, weight.grad.data_ptr()) == (torch.device(device), gradient)
            assert weight.grad.tolist() == values
            assert weight.requires_grad and weight.is_leaf and isinstance(weight, nn.Parameter)
        assert optimizer.state[weight]["exp_avg"].shape == weight.shape
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        assert weight.grad.device.type == "cpu"

    def test_memory_format_is_for_images_only(self) -> None:
        model = nn.Conv2d(2, 3, 3)
        torch_uvm.to(model, "emu", managed=True, memory_format=torch.channels_last)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        assert model.bias is not None and torch_uvm.is_managed(model.bias)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
    def test_other_dtypes_are_refused(self, dtype: torch.dtype) -> None:
        model = self.model()
        with pytest.raises(TypeError, match=f"{dtype}.*floating-point and complex"):
            torch_uvm.to(model, "cpu", dtype)
        assert {(t.device.type, t.dtype) for t in model.parameters()} == {("emu", torch.float32)}

    def test_deepcopy_of_a_moved_module(self) -> None:
        model = torch_uvm.to(self.model(), "cpu")
        twin = copy.deepcopy(model)
        twin[0].weight.data.zero_()
        assert model[0].weight.abs().sum() > 0
