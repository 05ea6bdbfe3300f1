"""PyTorch's own table of operators, each on its sample inputs: forward and gradients equal the CPU's
to the last bit, and results are on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import torch_uvm  # noqa: F401  (registers the device)

SAMPLES = 3

# Why an operator is left out.
UNDEFINED_VALUES = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
NO_SPARSE_TENSORS = {"sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"}
READS_BEYOND_ITS_VIEW = {"as_strided.partial_views"}  # and the sample's storage does not travel
CPU_ARGUMENT_ONLY = {"tensor_split"}  # takes its split points as a CPU tensor, on every device
LEFT_OUT = UNDEFINED_VALUES | NO_SPARSE_TENSORS | READS_BEYOND_ITS_VIEW | CPU_ARGUMENT_ONLY


def is_compared(op: OpInfo) -> bool:
    # jiterator compiles CUDA code
    return torch.float32 in op.dtypes and name_of(op) not in LEFT_OUT and "jiterator" not in op.name


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def on_device(value: Any) -> Any:
    """The same value with every tensor on `emu`; tensors keep what they want of autograd."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("emu").requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_device, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_device, value))
    if isinstance(value, dict):
        return {key: on_device(item) for key, item in value.items()}
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("emu")
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaNs of any pattern are alike, and a tensor of no elements has no bits."""
    left = left.detach().resolve_conj().resolve_neg()
    right = right.detach().cpu().resolve_conj().resolve_neg()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if left.is_floating_point():
        signs_alike = torch.equal(left.signbit() & ~left.isnan(), right.signbit() & ~right.isnan())
        return signs_alike and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    return torch.equal(left, right)


def backward(results: list[torch.Tensor]) -> bool:
    """Backward from the sum of what wants a gradient; False if nothing does."""
    wanted = [result for result in results if result.requires_grad]
    if wanted:
        parts = [(torch.view_as_real(r) if r.is_complex() else r).sum() for r in wanted]
        torch.stack([part.double() for part in parts]).sum().backward()
    return bool(wanted)


# Many operators warn of one thing or another; none of it is about devices.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [op for op in op_db if is_compared(op)], ids=name_of)
def test_equal_to_cpu(op: OpInfo) -> None:
    compared = 0
    for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd), SAMPLES):
        inputs = (sample.input, tuple(sample.args))
        for tensor in tensors_in(inputs):
            tensor.grad = None  # samples share tensors
        torch.manual_seed(0)
        try:
            expected = list(tensors_in(op(sample.input, *sample.args, **sample.kwargs)))
        except (RuntimeError, NotImplementedError):
            continue  # the CPU does not take this sample
        moved = on_device(inputs)
        torch.manual_seed(0)
        results = list(tensors_in(op(moved[0], *moved[1], **on_device(sample.kwargs))))
        assert [r.device.type for r in results] == ["emu"] * len(expected)
        assert all(map(same_bits, expected, results))
        compared += 1
        if not op.supports_autograd:
            continue
        try:
            differentiated = backward(expected)
        except (RuntimeError, NotImplementedError):
            continue
        if differentiated:
            backward(results)
            for tensor, twin in zip(tensors_in(inputs), tensors_in(moved), strict=True):
                if tensor.grad is not None:
                    assert twin.grad is not None
                    assert same_bits(tensor.grad, twin.grad)
    assert compared > 0 or not results_expected(op)


def results_expected(op: OpInfo) -> bool:
    """Whether the table has any sample that the CPU takes."""
    for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES):
        try:
            op(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, NotImplementedError):
            continue
        return True
    return False
