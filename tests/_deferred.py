"""Models trained under a budget with `enable(optimizer="deferred")`, and every optimizer that defers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_uvm

MIB = 1024**2
DEVICE = torch.device("emu", 0)
BUDGET = 12 * MIB

Optimizer = torch.optim.Optimizer
Make = Callable[..., Optimizer]


def mlp(width: int = 512, layers: int = 4) -> nn.Module:
    """Weights of 1 MiB, and small parameters, which are never deferred."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10)).to("emu")


def batch(width: int = 512) -> torch.Tensor:
    return torch.randn(32, width).to("emu")


def backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(batch()).square().mean()
    loss.backward()
    return loss.detach()


def first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def everything(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    return [*model.state_dict().values(), *state]


def versions(model: nn.Module, optimizer: Optimizer) -> list[int]:
    return [tensor._version for tensor in everything(model, optimizer)]


def on_cpu(tensors: list[Any]) -> list[torch.Tensor]:
    return [torch.as_tensor(tensor).detach().cpu() for tensor in tensors]


def bytes_at(address: int, tensor: torch.Tensor) -> torch.Tensor:
    torch.accelerator.synchronize()
    return torch.frombuffer(bytearray(ctypes.string_at(address, tensor.nbytes)), dtype=torch.uint8)


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), number


def assert_deferred_bits(program: Callable[[], list[torch.Tensor]], budget: int = BUDGET) -> None:
    """The program gives the bits of immediate steps without a budget, too, if it defers under this one."""
    torch_uvm.enable(budget=None)
    wanted = program()
    torch_uvm.enable(budget=budget, optimizer="deferred")
    torch_uvm.memory.reset_residency_stats()
    assert_equal(program(), wanted)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, weight_decay=0.1),
    "adam fused": lambda p: torch.optim.Adam(
        p, lr=0.01, fused=True, amsgrad=True, maximize=True, weight_decay=0.1
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),  # writes gradients
    "sgd decay": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adamax loop": lambda p: torch.optim.Adamax(p, lr=0.01, foreach=False),  # writes by `out=`
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


def stepped(make: Callable[[Any], Optimizer] = OPTIMIZERS["adamw fused"]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return model, optimizer


def at_once(make: Callable[[Any], Optimizer] = OPTIMIZERS["adamw fused"]) -> list[torch.Tensor]:
    torch_uvm.enable(budget=None, optimizer="in_place")
    return on_cpu(everything(*stepped(make)))
