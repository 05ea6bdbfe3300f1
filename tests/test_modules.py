"""PyTorch's own table of modules: outputs, gradients and buffers equal the CPU's to the last bit, but for the
roundings of recurrent layers.

Tested in plain memory, and in managed memory that moves after each operator.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _tables import backward, on_device, same_bits, seed, some, tensors_in
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

import torch_uvm  # noqa: F401  (registers the device)

SAMPLES = 3

# PyTorch composes these by device (docs/emulator.md).
ROUNDED = {"nn.RNN", "nn.GRU", "nn.LSTM", "nn.RNNCell", "nn.GRUCell", "nn.LSTMCell"}

# PyTorch warns of inputs without a batch; some modules have been renamed.
pytestmark = pytest.mark.filterwarnings("ignore")


def name_of(info: ModuleInfo) -> str:
    return str(info.name)


def is_compared(info: ModuleInfo) -> bool:
    return torch.float32 in info.dtypes and not info.name.startswith(("ao.", "quantized."))


def cases(info: ModuleInfo) -> Iterator[tuple[nn.Module, ModuleInput]]:
    """Modules on the CPU, and their inputs."""
    for training in (True, False) if info.train_and_eval_differ else (True,):
        seed(0)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for number, sample in enumerate(some(inputs, info.name, SAMPLES)):
            if sample.forward_input is None:
                continue
            seed(number)
            constructor = sample.constructor_input
            module = info.module_cls(*constructor.args, **constructor.kwargs)
            yield module.to(torch.float32).train(training), sample


def run(module: nn.Module, args: Any, kwargs: Any) -> dict[str, torch.Tensor | None]:
    """Outputs, gradients and buffers of one step, by name."""
    seed(7)
    outputs = list(tensors_in(module(*args, **kwargs)))
    backward(outputs)
    found: dict[str, torch.Tensor | None] = {f"output {i}": output for i, output in enumerate(outputs)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    found |= {
        f"gradient of input {i}": tensor.grad
        for i, tensor in enumerate(tensors_in((args, list(kwargs.values()))))
    }
    found |= dict(module.named_buffers())
    return found


def compare(info: ModuleInfo) -> None:
    for module, sample in cases(info):
        args, kwargs = tuple(sample.forward_input.args), dict(sample.forward_input.kwargs)
        twin = copy.deepcopy(module).to("emu")
        moved_args, moved_kwargs = on_device(args), on_device(kwargs)
        for tensor in tensors_in((args, list(kwargs.values()))):
            tensor.grad = None  # samples share tensors
        expected, found = run(module, args, kwargs), run(twin, moved_args, moved_kwargs)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            # An input that is no leaf has no gradient on the CPU, but its copy on the device has one.
            if value is not None:
                other = found[name]
                assert other is not None and other.device.type == "emu", name
                if info.name in ROUNDED:
                    torch.testing.assert_close(other.cpu(), value, msg=name)
                else:
                    assert same_bits(value, other), name


@pytest.mark.parametrize("info", [info for info in module_db if is_compared(info)], ids=name_of)
class TestEachModule:
    def test_equal_to_cpu(self, info: ModuleInfo) -> None:
        compare(info)

    @pytest.mark.usefixtures("evicting")
    def test_equal_to_cpu_while_memory_moves(self, info: ModuleInfo) -> None:
        compare(info)
