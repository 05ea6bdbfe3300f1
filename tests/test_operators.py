"""PyTorch's own table of operators: on sample inputs, results and gradients equal the CPU's to the last bit.

Tested in plain memory, and in managed memory that moves after each operator.
"""

from __future__ import annotations

import pytest
import torch
from _tables import backward, on_device, same_bits, seed, some, tensors_in
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import torch_uvm  # noqa: F401  (registers the device)

SAMPLES = 3
SAMPLES_THAT_MOVE = 2

# Reasons to leave out an operator.
UNDEFINED_VALUES = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
NO_COMPRESSED_TENSORS = {"sparse.mm.reduce", "sparse.sampled_addmm"}
READS_BEYOND_ITS_VIEW = {"as_strided.partial_views"}  # the sample's storage outside of the view is not moved
DEPENDS_ON_ADDRESSES = {"linalg.lstsq.grad_oriented"}  # on the CPU too: bits depend on alignment
CPU_ARGUMENT_ONLY = {"tensor_split"}  # takes its split points as a CPU tensor, on every device
LEFT_OUT = (
    UNDEFINED_VALUES
    | NO_COMPRESSED_TENSORS
    | READS_BEYOND_ITS_VIEW
    | DEPENDS_ON_ADDRESSES
    | CPU_ARGUMENT_ONLY
)


def is_compared(op: OpInfo) -> bool:
    # jiterator compiles CUDA code
    return torch.float32 in op.dtypes and name_of(op) not in LEFT_OUT and "jiterator" not in op.name


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples_of(op: OpInfo, most: int) -> list[SampleInput]:
    seed(0)
    # Not sample_inputs, which looks for a unittest.TestCase on the stack: most of the time of these tests.
    samples = op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=op.supports_autograd)
    return some(samples, name_of(op), most)


def compare(op: OpInfo, samples: list[SampleInput]) -> int:
    """Runs the operator on both devices. Returns the number of samples that the CPU accepts."""
    compared = 0
    for sample in samples:
        inputs = (sample.input, tuple(sample.args))
        for tensor in tensors_in(inputs):
            tensor.grad = None  # samples share tensors
        seed(0)
        try:
            expected = list(tensors_in(op(sample.input, *sample.args, **sample.kwargs)))
        except (RuntimeError, NotImplementedError):
            continue  # the CPU rejects this sample
        moved = on_device(inputs)
        seed(0)
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
    return compared


# Many operators warn; no warning is about devices.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [op for op in op_db if is_compared(op)], ids=name_of)
class TestEachOperator:
    def test_equal_to_cpu(self, op: OpInfo) -> None:
        assert compare(op, samples_of(op, SAMPLES)) > 0 or not results_expected(op)

    @pytest.mark.usefixtures("evicting")
    def test_equal_to_cpu_while_memory_moves(self, op: OpInfo) -> None:
        compare(op, samples_of(op, SAMPLES_THAT_MOVE))


def results_expected(op: OpInfo) -> bool:
    """Whether the table has a sample that the CPU accepts."""
    for sample in samples_of(op, SAMPLES):
        try:
            op(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, NotImplementedError):
            continue
        return True
    return False
