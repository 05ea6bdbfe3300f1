"""Deferred steps: every kind of access to a tensor sees the finished step.

Each program runs twice on the emulated accelerator: without a budget and with immediate steps, and under a
hard budget with deferred steps. The program also asserts that updates were pending at the access.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from _deferred import (
    BUDGET,
    OPTIMIZERS,
    Optimizer,
    assert_equal,
    backward,
    batch,
    bytes_at,
    everything,
    first,
    mlp,
    on_cpu,
)
from torch import nn

import torch_uvm
from torch_uvm import _C

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")


# --- accesses between two steps: generators; code before the yield runs before the step

Look = Callable[[nn.Module, Optimizer], Generator[None, None, list[Any]]]
LOOKS: dict[str, Look] = {}


def look(function: Look) -> Look:
    LOOKS[function.__name__.replace("_", " ")] = function
    return function


@look
def operators(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return [parameter * 1 for parameter in model.parameters()]


@look
def lists(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return torch._foreach_norm(list(model.parameters()))


@look
def state_dict(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return [value.clone() for value in model.state_dict().values()]


@look
def state_dict_of_the_optimizer(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    state = optimizer.state_dict()["state"]
    return [value.clone() for each in state.values() for value in each.values()]


@look
def saving(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "state": optimizer.state_dict()["state"]}, file)
    file.seek(0)
    loaded = torch.load(file)
    return [*loaded["model"].values(), *(v for each in loaded["state"].values() for v in each.values())]


@look
def deepcopy(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    both = copy.deepcopy((model, optimizer))
    return everything(*both)


@look
def alias_from_before(model: nn.Module, optimizer: Optimizer) -> Any:
    alias, view = first(model).data, first(model).detach().view(-1)[7:99]
    yield
    return [view.clone(), alias.clone()]


@look
def write_through_a_view(model: nn.Module, optimizer: Optimizer) -> Any:
    view = first(model).detach()[3:5]
    yield
    view.mul_(2)
    return []


@look
def address(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    parameter = first(model)
    return [bytes_at(parameter.data_ptr(), parameter)]


@look
def address_of_the_storage(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    moment = optimizer.state[first(model)]["exp_avg"]
    return [bytes_at(moment.untyped_storage().data_ptr(), moment)]


@look
def resident_scope(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    with torch_uvm.resident(model):
        assert _C.pending_updates() == 0
        return [bytes_at(first(model).data_ptr(), first(model))]


@look
def numpy_of_the_cpu_label(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return [torch_uvm.to(first(model).detach(), "cpu").numpy().copy()]


@look
def dlpack(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return [np.from_dlpack(first(model).detach(), device="cpu").copy()]


@look
def storage_copied(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return [torch.tensor([], dtype=torch.float32).set_(first(model).detach().cpu().untyped_storage())]


@look
def storage_used(model: Any, optimizer: Optimizer) -> Any:
    yield
    pending = _C.pending_updates()
    first(model).data.untyped_storage().fill_(63)  # type: ignore[attr-defined]
    assert _C.pending_updates() == max(pending - 1, 0)
    moment = optimizer.state[model[2].weight]["exp_avg"].untyped_storage()
    typed = model[4].weight.data._typed_storage()
    found = [torch.tensor(moment[7]), torch.empty(0, device="emu").set_(typed)]
    return [*found, *copy.deepcopy(model.state_dict()).values()]


@look
def evaluation(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    model.eval()
    with torch.no_grad():
        seen = [model(batch())]
    model.train()
    with torch.inference_mode():
        return [*seen, model(batch()).clone()]


@look
def functional_transforms(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(model, parameters, (x,)).square().mean()
        return result

    one_by_one = torch.func.vmap(torch.func.functional_call, in_dims=(None, None, 0))
    return [*torch.func.grad(loss)(parameters, batch()).values(), one_by_one(model, parameters, batch())]


@look
def gradients_read(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


@look
def gradients_dropped(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    optimizer.zero_grad(set_to_none=True)
    assert _C.pending_updates() in (0, 4)  # no access yet
    return []


@look
def gradients_without_bytes(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    for parameter in model.parameters():
        parameter.grad.untyped_storage().resize_(0)  # type: ignore[union-attr]
    assert _C.pending_updates() == 0
    return []


@look
def gradients_zeroed(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    optimizer.zero_grad(set_to_none=False)
    return []


@look
def gradients_written(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    first(model).grad.fill_(7)  # type: ignore[union-attr]
    return []


@look
def gradients_clipped(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    return [nn.utils.clip_grad_norm_(model.parameters(), 1e-3)]


@look
def gradients_accumulated(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    backward(model)
    optimizer.step()
    return []


@look
def data_exchanged(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    old = first(model).data
    first(model).data = torch.zeros_like(old)
    return [old]


@look
def parameter_overwritten(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    with torch.no_grad():
        first(model).zero_()
    return []


@look
def tensors_swapped(model: nn.Module, optimizer: Optimizer) -> Any:
    other = torch.nn.Parameter(torch.ones_like(first(model)))
    yield
    torch.utils.swap_tensors(first(model), other)
    return [other]


@look
def moment_overwritten(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    optimizer.state[first(model)]["exp_avg"].zero_()
    return []


@look
def step_count_written(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    optimizer.state[first(model)]["step"].add_(5)
    return []


@look
def state_loaded(model: nn.Module, optimizer: Optimizer) -> Any:
    before = copy.deepcopy(optimizer.state_dict())
    yield
    optimizer.load_state_dict(before)
    return []


@look
def own_state_loaded(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    optimizer.load_state_dict(optimizer.state_dict())
    return []


@look
def parameters_loaded(model: nn.Module, optimizer: Optimizer) -> Any:
    before = copy.deepcopy(model.state_dict())
    yield
    model.load_state_dict(before)
    return []


@look
def rate_changed(model: nn.Module, optimizer: Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    yield
    scheduler.step()
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    optimizer.param_groups[0]["weight_decay"] = 3.0
    return []


@look
def step_again_with_the_same_gradients(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    optimizer.step()
    return []


@look
def another_optimizer(model: nn.Module, optimizer: Optimizer) -> Any:
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    yield
    other.step()
    other.step()
    return [other.state[first(model)]["momentum_buffer"]]


@look
def another_model_with_the_parameters(model: nn.Module, optimizer: Optimizer) -> Any:
    other = nn.Sequential(*list(model)[:2], nn.Linear(512, 4).to("emu"))  # type: ignore[call-overload]
    yield
    return [backward(other)]


@look
def another_group(model: nn.Module, optimizer: Optimizer) -> Any:
    yield
    more = nn.Parameter(torch.ones(512, 512, device="emu"))
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    more.grad = torch.ones_like(more)
    optimizer.step()
    return [more]


@look
def averaged(model: nn.Module, optimizer: Optimizer) -> Any:
    mean = torch.optim.swa_utils.AveragedModel(model)
    mean.update_parameters(model)
    yield
    mean.update_parameters(model)
    return [*mean.parameters()]


@look
def backward_through_an_older_graph(model: nn.Module, optimizer: Optimizer) -> Any:
    loss = model(batch()).square().mean()
    yield
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return []


def program(look: Look, make: Callable[[Any], Optimizer], pending: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = make(model.parameters())
    for _ in range(3):  # SGD makes its buffers in the first step
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    results = [value.clone() for value in everything(model, optimizer)]
    optimizer.zero_grad()
    backward(model)
    looking = look(model, optimizer)
    next(looking)
    optimizer.step()
    assert _C.pending_updates() == pending
    try:
        next(looking)
        pytest.fail("one yield")
    except StopIteration as stop:
        results += [torch.as_tensor(value).clone() for value in stop.value]
    optimizer.zero_grad()
    results.append(backward(model))
    optimizer.step()
    return on_cpu([*results, *everything(model, optimizer)])


class TestLooks:
    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            *itertools.product(["adamw fused", "adamw foreach"], LOOKS),
            ("sgd nesterov", "gradients read"),  # its foreach implementation writes gradients in the step
        ],
    )
    def test_finds_the_bits_of_a_step_at_once(self, kind: str, name: str) -> None:
        if name == "backward through an older graph" and kind == "adamw fused":
            pytest.skip("PyTorch's fused kernels do not count the versions of what they write")
        torch_uvm.enable(budget=None)
        wanted = program(LOOKS[name], OPTIMIZERS[kind], 0)
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        assert_equal(program(LOOKS[name], OPTIMIZERS[kind], 4), wanted)
