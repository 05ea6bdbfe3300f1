"""Sparse COO and nested tensors on the emulated accelerator: bits equal the CPU's, also under a budget."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from _tables import on_device, same_bits, tensors_in
from test_operators import name_of
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5),
    "momentum": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.5, foreach=False),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, 0.5),
}

TAKES_NO_SAMPLE = {"zeros_like", "randn_like"}  # on the CPU
SPARSE = [op for op in op_db if op.supports_sparse and op.name not in TAKES_NO_SAMPLE]


def matrix(device: str = "emu") -> torch.Tensor:
    """3 x 4, with an element that occurs twice."""
    indices = torch.tensor([[0, 2, 0, 1], [3, 1, 3, 0]], device=device)
    return torch.sparse_coo_tensor(indices, torch.tensor([1.5, 2.5, 3.5, 4.5], device=device), (3, 4))


class TestSparse:
    def test_parts_are_on_the_device(self) -> None:
        x = matrix()
        assert x.is_sparse and x.device == torch.device("emu:0") and not x.is_coalesced()
        assert x._indices().device == x._values().device == x.device
        assert same_bits(matrix("cpu"), x) and same_bits(matrix("cpu").coalesce(), x.coalesce())

    def test_values_are_not_copied(self) -> None:
        values = torch.ones(2, device="emu")
        x = torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.int64, device="emu"), values, (3,))
        assert x._values().data_ptr() == values.data_ptr()
        values.fill_(2)
        assert x.to_dense().tolist() == [4, 0, 0]

    def test_copies(self) -> None:
        here = matrix("cpu")
        there = here.to("emu")
        assert there.device.type == "emu" and there.is_sparse
        assert same_bits(here, there) and same_bits(here, there.cpu()) and same_bits(here, there.clone())
        target = torch.empty(3, 4, layout=torch.sparse_coo, device="emu")
        assert same_bits(here, target.copy_(here)) and same_bits(here, target)
        back = torch.empty(3, 4, layout=torch.sparse_coo)
        assert same_bits(here, back.copy_(there))

    def test_writes_reach_the_tensor(self) -> None:
        here, there = matrix("cpu").coalesce(), matrix().coalesce()
        for x in (here, there):
            x.mul_(3).add_(matrix(x.device.type)).neg_()
        assert same_bits(here, there)
        here.zero_()
        there.zero_()
        assert same_bits(here, there) and there._nnz() == 0

    def test_from_dense(self) -> None:
        dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        assert same_bits(dense.to_sparse(), dense.to("emu").to_sparse())

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("op", SPARSE, ids=name_of)
    def test_operators_equal_the_cpu(self, op: OpInfo) -> None:
        compared = 0
        for sample in samples_of(op):
            inputs = (sample.input, tuple(sample.args))
            try:
                expected = list(tensors_in(op(sample.input, *sample.args, **sample.kwargs)))
            except (RuntimeError, NotImplementedError):
                continue  # the CPU rejects this sample
            moved = on_device(inputs)
            results = list(tensors_in(op(moved[0], *moved[1], **on_device(sample.kwargs))))
            assert [r.device.type for r in results] == ["emu"] * len(expected)
            assert all(map(same_bits, expected, results))
            compared += 1
        assert compared > 0


def samples_of(op: OpInfo) -> list[SampleInput]:
    """PyTorch's samples for sparse operands; if there are none, its dense samples, converted."""
    try:
        return list(islice(op.sample_inputs_sparse_coo("cpu", torch.float32), 8))
    except NotImplementedError:
        dense = [sample for sample in op.sample_inputs("cpu", torch.float32) if sample.input.dim()]
        return [sample.transform(sparse) for sample in dense[:8]]


def sparse(value: Any) -> Any:
    return value.to_sparse() if isinstance(value, torch.Tensor) else value


def train_rows(
    device: str, optimizer: Optimizer, make: Callable[..., nn.Module], rows: int, width: int
) -> torch.Tensor:
    torch.manual_seed(0)
    table: Any = make(rows, width, sparse=True).to(device)
    optimize = optimizer(table.parameters())
    for step in range(3):
        torch.manual_seed(step)
        loss = table(torch.randint(0, rows, (4, 64)).to(device)).square().sum()
        loss.backward()
        assert table.weight.grad.is_sparse
        optimize.step()
        optimize.zero_grad()
    weight: torch.Tensor = table.weight.detach().cpu()
    return weight


class TestSparseGradients:
    @pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_embeddings_train_as_on_the_cpu(self, optimizer: str, make: Callable[..., nn.Module]) -> None:
        expected = train_rows("cpu", OPTIMIZERS[optimizer], make, 50, 16)
        assert torch.equal(train_rows("emu", OPTIMIZERS[optimizer], make, 50, 16), expected)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_under_a_budget_below_one_gradient(self, optimizer: str) -> None:
        """The table is 4 MiB. A gradient's values are 0.5 MiB, which the engine can move. The budget is 2
        MiB."""
        expected = train_rows("cpu", OPTIMIZERS[optimizer], nn.Embedding, 2048, 512)
        torch_uvm.enable(budget=2 * MIB)
        before = torch_uvm.stats()["written_back"]["count"]
        assert torch.equal(train_rows("emu", OPTIMIZERS[optimizer], nn.Embedding, 2048, 512), expected)
        assert torch_uvm.stats()["written_back"]["count"] > before

    def test_parts_come_back_to_the_device(self) -> None:
        """Indices and values are evicted. An operator on the sparse tensor fetches them."""
        torch_uvm.enable(budget=2 * MIB)
        count = MIB // 16
        values = torch.arange(count, dtype=torch.float32, device="emu")
        x = torch.sparse_coo_tensor(torch.arange(count, device="emu").view(1, -1), values, (count,))
        total = torch.zeros(count, device="emu")
        other = torch.ones(MIB // 4, device="emu")
        for _ in range(4):
            _C.evict_after_operators(True)
            other.add_(1)
            _C.evict_after_operators(False)
            assert torch_uvm.residency(values) == {torch.device("cpu"): MIB // 4}
            total.add_(x)
            here = {torch.device("emu:0"): MIB // 4}
            assert torch_uvm.residency(values) == torch_uvm.residency(total) == here
        assert torch.equal(total.cpu(), torch.arange(count, dtype=torch.float32) * 4)


def nested(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    parts = [torch.randn(length, 6).to(device) for length in (4, 1, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.strided)


def same_nested(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.is_nested and right.is_nested and all(map(same_bits, left.unbind(), right.unbind()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
class TestNested:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x * 2 + x,
            lambda x: torch.relu(x).neg_(),
            lambda x: nn.functional.softmax(x, -1),
            lambda x: nn.functional.layer_norm(x, (6,), *torch.ones(2, 6).to(x.device)),
            lambda x: x.transpose(1, 2).contiguous(),
            lambda x: x.clone(),
            lambda x: x.bfloat16(),
            lambda x: nn.functional.linear(x, torch.ones(5, 6).to(x.device)),
        ],
        ids=["arithmetic", "in place", "softmax", "layer_norm", "transposed", "clone", "dtype", "linear"],
    )
    def test_equal_to_the_cpu(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        expected, result = function(nested("cpu")), function(nested("emu"))
        assert result.device.type == "emu"
        assert same_nested(expected, result)

    def test_copies(self) -> None:
        here = nested("cpu")
        there = here.to("emu")
        assert there.device.type == "emu" and there.cpu().device.type == "cpu"
        assert same_nested(here, there) and same_nested(here, there.cpu())

    def test_padded(self) -> None:
        assert same_bits(nested("cpu").to_padded_tensor(-1.0), nested("emu").to_padded_tensor(-1.0))

    def test_gradients(self) -> None:
        gradients = []
        for device in ("cpu", "emu"):
            torch.manual_seed(0)
            parts = [torch.randn(length, 6).to(device).requires_grad_() for length in (4, 1, 3)]
            x = torch.nested.as_nested_tensor(parts, layout=torch.strided)
            torch.relu(x * 3).to_padded_tensor(0.0).square().sum().backward()
            gradients.append([part.grad for part in parts])
        assert all(map(same_bits, *gradients))

    @pytest.mark.parametrize("width", [16, 256], ids=["small", "moved under a budget"])
    def test_encoders_of_padded_sequences(self, width: int) -> None:
        """In evaluation PyTorch's encoder converts the unpadded part to a nested tensor.

        Parameters of 256 KiB and more are movable. The budget is about half of them.
        """
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        x, padding = torch.randn(3, 5, width), torch.arange(5) >= torch.tensor([[5], [3], [2]])
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=padding)
            assert not expected[2, 2:].any()  # zero padding shows that the nested tensor was made
            if width > 16:
                torch_uvm.enable(budget=2 * MIB)
            model.to("emu")
            for _ in range(2):
                assert same_bits(expected, model(x.to("emu"), src_key_padding_mask=padding.to("emu")))
        if width > 16:
            assert torch_uvm.stats()["written_back"]["count"] > 0
