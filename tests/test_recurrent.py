"""Recurrent layers on the emulated accelerator: values and gradients are the CPU's, except for roundings.

Also tested: memory that moves after each operator, second derivatives, batches of gradients, and a layer
whose weights' storage is freed between forward and backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import torch_uvm

KINDS: dict[str, tuple[Callable[..., nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm projected": (nn.LSTM, {"proj_size": 5}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {"nonlinearity": "tanh"}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "bidirectional": {"bidirectional": True, "num_layers": 2},
    "dropout": {"dropout": 0.4, "num_layers": 3, "batch_first": True},
    "no bias": {"bias": False, "batch_first": True, "bidirectional": True},
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}


@pytest.fixture(params=["plain", "evicting"])
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "evicting":
        request.getfixturevalue("evicting")
    yield


def make(kind: str, options: str = "one layer", dtype: torch.dtype = torch.float32) -> nn.RNNBase:
    layer, own = KINDS[kind]
    torch.manual_seed(0)
    return layer(6, 8, **own, **OPTIONS[options]).to(dtype)


def step(
    layer: nn.RNNBase, device: str, packed: bool, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Outputs, last states and gradients of one step of a copy of the layer on a device."""
    layer = copy.deepcopy(layer).to(device)
    torch.manual_seed(1)
    x = torch.randn(4, 4, 6, dtype=dtype).to(device).requires_grad_()
    given: Any = pack_padded_sequence(x, torch.tensor([4, 3, 3, 1]), layer.batch_first) if packed else x
    torch.manual_seed(2)
    output, states = layer(given)
    if isinstance(output, PackedSequence):
        output = output.data
    results = [output, *(states if isinstance(states, tuple) else [states])]
    sum(result.square().sum() for result in results).backward()
    gradients = [tensor.grad for tensor in (x, *layer.parameters())]
    return results + [gradient for gradient in gradients if gradient is not None]


def assert_equal(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert len(expected) == len(found) > 0
    for number, (value, other) in enumerate(zip(expected, found, strict=True)):
        assert other.device.type == "emu"
        close = 0.05 if value.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(other.cpu(), value, atol=close, rtol=close, msg=str(number))


@pytest.mark.usefixtures("memory")
class TestLayers:
    @pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_equal_to_cpu(self, kind: str, options: str, packed: bool) -> None:
        layer = make(kind, options)
        assert_equal(step(layer, "cpu", packed), step(layer, "emu", packed))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_other_dtypes(self, kind: str, dtype: torch.dtype) -> None:
        layer = make(kind, dtype=dtype)
        assert_equal(step(layer, "cpu", False, dtype), step(layer, "emu", False, dtype))

    @pytest.mark.parametrize("kind", CELLS)
    def test_cells(self, kind: str) -> None:
        torch.manual_seed(0)
        cell = CELLS[kind](6, 8)
        x = torch.randn(4, 6)
        results = []
        for module, on in ((cell, "cpu"), (copy.deepcopy(cell).to("emu"), "emu")):
            state: Any = None
            for _ in range(3):
                state = module(x.to(on), state)
            outputs = list(state) if isinstance(state, tuple) else [state]
            sum(output.square().sum() for output in outputs).backward()
            results.append(outputs + [p.grad for p in module.parameters() if p.grad is not None])
        assert_equal(*results)


class TestTransforms:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("kind", KINDS)
    def test_second_derivatives(self, kind: str, dtype: torch.dtype) -> None:
        layer = make(kind, dtype=dtype)
        results = []
        for device in ("cpu", "emu"):
            module = copy.deepcopy(layer).to(device)
            torch.manual_seed(1)
            x = torch.randn(3, 2, 6, dtype=dtype).to(device).requires_grad_()
            inputs = [x, *module.parameters()]
            first = torch.autograd.grad(module(x)[0].square().sum(), inputs, create_graph=True)
            loss = sum(g.square().sum() for g in first)
            assert isinstance(loss, torch.Tensor)
            results.append([*first, *torch.autograd.grad(loss, inputs)])
        assert_equal(*results)

    @pytest.mark.parametrize("kind", KINDS)
    def test_batches_of_gradients(self, kind: str) -> None:
        layer = make(kind, dtype=torch.float64)
        results = []
        for device in ("cpu", "emu"):
            module = copy.deepcopy(layer).to(device)
            torch.manual_seed(1)
            x = torch.randn(3, 2, 6, dtype=torch.float64).to(device).requires_grad_()
            output = module(x)[0]
            seeds = torch.randn(5, *output.shape, dtype=torch.float64).to(device)
            results.append(
                list(torch.autograd.grad(output, [x, *module.parameters()], seeds, is_grads_batched=True))
            )
        assert_equal(*results)


class TestErrors:
    @pytest.mark.parametrize("kind", KINDS)
    def test_layers_on_another_device_than_their_input(self, kind: str) -> None:
        x = torch.randn(3, 2, 6)
        with pytest.raises(RuntimeError, match="Input and parameter tensors are not at the same device"):
            make(kind)(x.to("emu"))
        with pytest.raises(RuntimeError, match="not at the same device"):
            make(kind).to("emu")(x)

    @pytest.mark.parametrize("kind", CELLS)
    def test_cells_on_another_device_than_their_input(self, kind: str) -> None:
        x = torch.randn(2, 6)
        for cell, given in ((CELLS[kind](6, 8), x.to("emu")), (CELLS[kind](6, 8).to("emu"), x)):
            with pytest.raises(
                RuntimeError,
                match="Expected all tensors to be on the same device, .*(emu:0 and cpu|cpu and emu:0)",
            ):
                cell(given)

    @pytest.mark.parametrize("kind", CELLS)
    def test_cells_with_sizes_that_do_not_fit(self, kind: str) -> None:
        cell = CELLS[kind](6, 8).to("emu")
        with pytest.raises(RuntimeError, match="input has inconsistent input_size: got 5 expected 6"):
            cell(torch.randn(2, 5, device="emu"))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_training_under_a_budget_that_does_not_hold_the_layer(kind: str) -> None:
    """Storages of usual sizes also move; test_budget_training.py tests how a budget holds."""
    results = []
    for device in ("cpu", "emu"):
        if device == "emu":
            torch_uvm.enable(budget="40MiB")
        torch.manual_seed(0)
        layer = getattr(nn, kind)(384, 512, 2, batch_first=True).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), 0.01)
        x = torch.randn(8, 10, 384).to(device)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = layer(x)[0].square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append([*losses, *(p.detach() for p in layer.parameters())])
    assert_equal(*results)
    assert torch_uvm.stats()["written_back"]["bytes"] > 0


class TestSavedByARecurrentLayer:
    """Programs that shard parameters free a storage after forward and refill it before backward."""

    def test_storage_with_other_memory(self) -> None:
        torch.manual_seed(0)
        layer: Any = nn.LSTM(64, 64).to("emu")
        x: Any = torch.randn(10, 8, 64).to("emu").requires_grad_()
        layer(x)[0].sum().backward()
        expected, x.grad = x.grad, None
        weights, kept = layer.weight_ih_l0, layer.weight_ih_l0.detach().clone()
        loss = layer(x)[0].sum()
        storage = weights.untyped_storage()
        size = storage.nbytes()
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(weights):
            storage.resize_(0)
            in_its_place = torch.full((size // 4,), torch.nan, device="emu")
            storage.resize_(size)
            weights.detach().copy_(kept)
        assert in_its_place.isnan().all()
        loss.backward()
        assert torch.equal(x.grad, expected)
