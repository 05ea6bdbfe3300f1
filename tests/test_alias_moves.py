"""`enable(moves="alias")`: plain calls move managed tensors. Follows the rows of RFC-0023's review."""

# mypy: disable-error-code="attr-defined, index, arg-type, call-arg, call-overload, no-untyped-call"

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import torch_uvm

ACCELERATOR = torch.accelerator.current_accelerator()
assert ACCELERATOR is not None
DEVICE = torch.device(ACCELERATOR.type, 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    torch_uvm.enable(moves="alias")
    yield
    torch_uvm.enable(moves="copy")
    torch_uvm.disable()


def to_device(x: torch.Tensor) -> torch.Tensor:
    return getattr(x, DEVICE.type)()  # type: ignore[no-any-return]


def on(device: torch.device) -> torch.Tensor:
    return torch_uvm.memory.zeros(4, 6, device=device).copy_(torch.arange(24.0).reshape(4, 6))


TO_CPU: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.cpu(),
    lambda x: x.to("cpu"),
    lambda x: x.to(CPU, torch.float32),
    lambda x: x.to(torch.zeros(1)),
    lambda x: x.to(device="cpu", non_blocking=True),
    lambda x: torch_uvm.to(x, "cpu"),
]
TO_DEVICE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    to_device,
    lambda x: x.to(DEVICE),
    lambda x: x.to(DEVICE.type),
    lambda x: x.to(0),
    lambda x: x.to(torch.zeros(1, device=DEVICE)),
    lambda x: getattr(x, DEVICE.type)(0, True),
]


class TestPlainCalls:
    @pytest.mark.parametrize("call", TO_CPU)
    def test_to_the_cpu_shares_the_bytes(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = on(DEVICE)[1:, ::2]
        y = call(x)
        assert (y.device, y.data_ptr()) == (CPU, x.data_ptr())
        assert (y.shape, y.stride(), y.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
        torch.accelerator.synchronize()
        y.add_(1)
        assert x.sum().item() == sum(v + 1 for row in range(1, 4) for v in range(row * 6, row * 6 + 6, 2))
        assert y._version == x._version

    @pytest.mark.parametrize("call", TO_DEVICE)
    def test_to_the_device_shares_the_bytes(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = on(CPU)
        y = call(x)
        assert (y.device, y.data_ptr()) == (DEVICE, x.data_ptr())
        y.mul_(2)
        assert torch_uvm.to(y, "cpu").sum() == 2 * sum(range(24))

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: x.to("cpu", torch.float32, False, True),
            lambda x: x.to(torch.zeros(1), False, True),
            lambda x: x.to(torch.float32, False, True),
            lambda x: x.to("cpu", None, False, True, managed=True),
        ],
    )
    def test_copy_by_position_copies(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = on(DEVICE)
        y = call(x)
        assert y.data_ptr() != x.data_ptr() and y.tolist() == x.tolist()
        assert call(on(CPU)).tolist() == x.tolist()

    @pytest.mark.parametrize("call", [nn.Module.cpu, lambda m: m.to("cpu"), lambda m: m.to(torch.float64)])
    def test_parameters_without_a_size_yet(self, call: Callable[[nn.Module], nn.Module]) -> None:
        lazy = call(nn.LazyLinear(3))
        assert isinstance(lazy.weight, nn.UninitializedParameter)

    def test_the_source_keeps_its_device(self) -> None:
        x = on(DEVICE)
        y = x.cpu()
        assert x.device == DEVICE
        assert (x + 1).sum().item() == y.sum().item() + 24

    def test_copy_asked_for_is_a_copy(self) -> None:
        x = on(DEVICE)
        y = x.to("cpu", copy=True)
        assert y.data_ptr() != x.data_ptr()
        y.zero_()
        assert x.sum().item() == sum(range(24))

    @pytest.mark.parametrize(
        "change",
        [
            lambda x: x.to("cpu", torch.float64),
            lambda x: x[None].expand(2, 3, 4, 6).to("cpu", memory_format=torch.channels_last),
        ],
        ids=["dtype", "memory_format"],
    )
    def test_a_change_of_bytes_is_a_copy(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = on(DEVICE)
        y = change(x[None])
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert y.sum().item() == change(on(CPU)[None]).sum().item()

    def test_managed_false_is_ordinary_memory(self) -> None:
        y = on(DEVICE).to("cpu", managed=False)
        assert not torch_uvm.is_managed(y)

    def test_same_device_is_the_tensor_itself(self) -> None:
        x = on(DEVICE)
        assert x.to(DEVICE) is x
        assert to_device(x) is x
        y = on(CPU)
        assert y.cpu() is y
        assert y.to(torch.float32) is y

    def test_ordinary_cpu_tensors_are_copied_into_managed_memory(self) -> None:
        x = torch.ones(3)
        y = x.to(DEVICE)
        assert torch_uvm.is_managed(y)
        y.zero_()
        assert x.tolist() == [1.0] * 3

    @pytest.mark.parametrize("call", [lambda x: x.cpu(), lambda x: x.to("cpu")])
    def test_waits_for_the_device(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = torch_uvm.memory.zeros(1 << 20)
        x.copy_(torch.ones(1 << 20).pin_memory(), non_blocking=True)
        assert call(x).sum() == 1 << 20

    def test_meta_goes_pytorchs_way(self) -> None:
        assert on(DEVICE).to("meta").device.type == "meta"
        assert torch.eye(3).to_sparse().to("cpu").is_sparse

    def test_bad_arguments_are_refused_as_by_pytorch(self) -> None:
        x = on(DEVICE)
        with pytest.raises(TypeError):
            x.cpu("cpu", 1, 2)
        with pytest.raises((RuntimeError, ValueError)):
            x.to("nowhere")
        with pytest.raises(TypeError):
            x.cpu(device="cpu")

    def test_moves_are_views_to_autograd(self) -> None:
        x = on(DEVICE).requires_grad_()
        y = x.cpu()
        with pytest.raises(RuntimeError, match="view"):
            y.add_(1)
        (y * 3).sum().backward()
        assert x.grad is not None
        assert (x.grad.device, x.grad.sum().item()) == (DEVICE, 72.0)


class TestModules:
    def test_parameters_keep_identity_ties_bytes_and_gradients(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to(DEVICE)
        model[2].weight = model[0].weight
        model(torch.randn(8, 4).to(DEVICE)).sum().backward()
        parameters = list(model.parameters())
        addresses = {name: t.data_ptr() for name, t in model.state_dict().items()}
        for move, device in (
            (nn.Module.cpu, CPU),
            (lambda m: m.to(DEVICE), DEVICE),
            (lambda m: m.to("cpu"), CPU),
        ):
            move(model)
            assert {name: t.data_ptr() for name, t in model.state_dict().items()} == addresses
            assert {t.device for t in model.state_dict().values()} == {device}
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            assert model[2].weight is model[0].weight
            assert model[0].weight.grad is not None
            assert model[0].weight.grad.device == device
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        assert all(state["exp_avg"].device == CPU for state in optimizer.state.values())

    @pytest.mark.parametrize("swap", [False, True])
    def test_moved_tensors_are_no_views(self, swap: bool) -> None:
        """Buffers are not views of their previous tensor, and gradients do not prevent swapping."""
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(DEVICE)
            model(torch.randn(8, 4).to(DEVICE)).sum().backward()
            weight = model[0].weight

            def tensors() -> list[torch.Tensor]:
                return [weight, weight.grad, model[1].running_mean]  # type: ignore[list-item]

            addresses = [t.data_ptr() for t in tensors()]
            for move, device in ((nn.Module.cpu, CPU), (lambda m: m.to(DEVICE), DEVICE)) * 3:
                move(model)
                assert model[0].weight is weight
                assert all(t.device == device and t._base is None for t in tensors())
                assert [t.data_ptr() for t in tensors()] == addresses
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def test_a_snapshot_needs_a_copy(self) -> None:
        """Aliasing breaks this documented idiom; an explicit copy repairs it."""
        model = nn.Linear(2, 2).to(DEVICE)
        shared = {name: t.cpu() for name, t in model.state_dict().items()}
        kept = {name: t.to("cpu", copy=True) for name, t in model.state_dict().items()}
        kept_too = copy.deepcopy(shared)
        with torch.no_grad():
            model.weight.zero_()
        torch.accelerator.synchronize()
        assert shared["weight"].abs().sum() == 0
        assert kept["weight"].abs().sum() > 0
        assert kept_too["weight"].abs().sum() > 0


class TestSwitch:
    def test_plain_calls_copy_while_off(self) -> None:
        x = on(DEVICE)
        with torch_uvm.disabled():
            assert x.cpu().data_ptr() != x.data_ptr()
        torch_uvm.disable()
        assert x.cpu().data_ptr() != x.data_ptr()
        with torch_uvm.enabled():
            assert x.cpu().data_ptr() == x.data_ptr()

    def test_each_enable_sets_it_anew(self) -> None:
        x = on(DEVICE)
        torch_uvm.enable()
        assert x.cpu().data_ptr() != x.data_ptr()
        assert to_device(on(CPU)).data_ptr() != x.data_ptr()
        torch_uvm.enable(moves="alias")
        assert x.cpu().data_ptr() == x.data_ptr()

    def test_training_equals_copies_to_the_last_bit(self) -> None:
        def train() -> list[float]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(DEVICE)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            data = torch_uvm.memory.empty(64, 8, device="cpu").copy_(torch.randn(64, 8))
            losses = []
            for _ in range(4):
                for start in range(0, 64, 16):
                    loss = model(data[start : start + 16].to(DEVICE)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach().cpu().item())
            return losses

        moved = train()
        torch_uvm.enable(moves="copy")
        assert moved == train()
