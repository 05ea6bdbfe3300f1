"""`enable(optimizer="deferred")`: the bits of a step at once, whenever and however somebody looks.

Each program runs twice on the emulated accelerator: without a budget and with steps at once, and under a hard
budget with steps deferred. That updates were pending when somebody looked is asserted, too.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib
import io
import textwrap
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _schedules import across_seeds
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
DEVICE = torch.device("emu", 0)
BUDGET = 12 * MIB

Optimizer = torch.optim.Optimizer
Make = Callable[..., Optimizer]


@pytest.fixture(autouse=True)
def steps_at_once_afterwards() -> Iterator[None]:
    yield
    torch_uvm.enable(budget=None, optimizer="in_place")
    assert _C.pending_updates() == 0
    torch_uvm.disable()
    gc.collect()
    _C.request_budget(None, None)
    torch_uvm.empty_cache()


def mlp(width: int = 512, layers: int = 4) -> nn.Module:
    """Weights of 1 MiB, and small ones that nobody defers."""
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


def everything(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    return [*model.state_dict().values(), *state]


def versions(model: nn.Module, optimizer: Optimizer) -> list[int]:
    return [tensor._version for tensor in everything(model, optimizer)]


def on_cpu(tensors: list[Any]) -> list[torch.Tensor]:
    return [torch.as_tensor(tensor).detach().cpu() for tensor in tensors]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), number


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
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


class TestBits:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_equal_at_every_budget(self, name: str) -> None:
        def train() -> tuple[list[torch.Tensor], list[int], int]:
            torch.manual_seed(0)
            model = mlp(768)
            optimizer = OPTIMIZERS[name](model.parameters())
            losses, most = [], 0
            for _ in range(7):
                loss = model(torch.randn(32, 768).to("emu")).square().mean()
                loss.backward()
                optimizer.step()
                most = max(most, _C.pending_updates())
                optimizer.zero_grad()
                losses.append(loss)
            return on_cpu([*losses, *everything(model, optimizer)]), versions(model, optimizer), most

        torch_uvm.enable(budget=None)
        torch_uvm.empty_cache()
        torch_uvm.reset_peak_memory_stats()
        wanted, counted, most = train()
        assert most == 0
        used = torch_uvm.max_memory_allocated(DEVICE)
        for part in (1.5, 2, 4):
            budget = int(used / part)
            torch_uvm.enable(budget=budget, optimizer="deferred")
            torch_uvm.reset_residency_stats()
            torch_uvm.reset_peak_memory_stats()
            found, found_versions, most = train()
            assert_equal(found, wanted)
            assert found_versions == counted
            assert most == 4
            figures = torch_uvm.residency_stats()
            assert figures["failures"] == 0
            assert figures["written_back"]["bytes"] > 0
            if figures["over_budget"] == 0:
                assert figures["peak_device_bytes"][DEVICE] <= budget
            assert _C.check_residency() is None
            torch_uvm.enable(budget=None, optimizer="in_place")

    def test_moments_are_not_used_in_place(self) -> None:
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        model = mlp(768, 8)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(10):
            if step == 1:
                torch_uvm.reset_residency_stats()
            model(torch.randn(32, 768).to("emu")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch_uvm.residency_stats()["used_in_place"]["count"] == 0
        assert torch_uvm.residency_stats()["fetched"]["bytes"] > 0


# --- what happens between a step and the next one: generators; what is before a yield comes before the step

Look = Callable[[nn.Module, Optimizer], Generator[None, None, list[Any]]]
LOOKS: dict[str, Look] = {}


def look(function: Look) -> Look:
    LOOKS[function.__name__.replace("_", " ")] = function
    return function


def first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


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


def bytes_at(address: int, tensor: torch.Tensor) -> torch.Tensor:
    torch.accelerator.synchronize()
    return torch.frombuffer(bytearray(ctypes.string_at(address, tensor.nbytes)), dtype=torch.uint8)


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
    assert _C.pending_updates() in (0, 4)  # nobody has looked
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
    for _ in range(3):  # SGD makes its buffers at the first one
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
    @pytest.mark.parametrize("name", LOOKS)
    @pytest.mark.parametrize("kind", ["adamw fused", "adamw foreach"])
    def test_finds_the_bits_of_a_step_at_once(self, name: str, kind: str) -> None:
        if name == "backward through an older graph" and kind == "adamw fused":
            pytest.skip("PyTorch's fused kernels do not count the versions of what they write")
        torch_uvm.enable(budget=None)
        wanted = program(LOOKS[name], OPTIMIZERS[kind], 0)
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        assert_equal(program(LOOKS[name], OPTIMIZERS[kind], 4), wanted)

    def test_gradients_that_the_step_writes(self) -> None:
        """SGD with nesterov, in its implementation for lists."""
        torch_uvm.enable(budget=None)
        wanted = program(LOOKS["gradients read"], OPTIMIZERS["sgd nesterov"], 0)
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        assert_equal(program(LOOKS["gradients read"], OPTIMIZERS["sgd nesterov"], 4), wanted)


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


class TestEnds:
    @pytest.mark.parametrize(
        "end",
        [
            torch_uvm.disable,
            lambda: torch_uvm.enable(optimizer="in_place"),
            lambda: torch_uvm.set_budget(None),
            lambda: torch_uvm.set_budget("1GiB"),
            _C.flush_all_pending,
        ],
        ids=["disable", "enable", "no budget", "another budget", "flush"],
    )
    def test_nothing_is_pending_afterwards(self, end: Callable[[], None]) -> None:
        wanted = at_once()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        both = stepped()
        assert _C.pending_updates() == 4
        end()
        assert _C.pending_updates() == 0
        assert_equal(on_cpu(everything(*both)), wanted)

    def test_a_budget_that_goes_behind_our_back(self) -> None:
        """What is pending then still runs when somebody looks."""
        wanted = at_once()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        both = stepped()
        _C.set_budget(0, None, False)
        assert _C.pending_updates() == 4
        assert_equal(on_cpu(everything(*both)), wanted)
        assert _C.pending_updates() == 0

    def test_a_scope(self) -> None:
        wanted = at_once()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        torch_uvm.disable()
        with torch_uvm.enabled():
            both = stepped()
            assert _C.pending_updates() == 4
        assert _C.pending_updates() == 0
        assert_equal(on_cpu(everything(*both)), wanted)

    def test_some_tensors(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        weights = [p for p in model.parameters() if p.dim() == 2 and p.shape[0] == 512]
        _C.flush_pending(weights[:2])
        assert _C.pending_updates() == 2
        gradient = weights[3].grad
        assert gradient is not None
        _C.flush_pending([optimizer.state[weights[2]]["exp_avg_sq"], gradient])
        assert _C.pending_updates() == 0

    def test_only_what_is_looked_at_runs(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, _ = stepped()
        for left, layer in zip((3, 2, 1, 0), list(model)[::2], strict=False):  # type: ignore[call-overload]
            layer.weight.sum()
            assert _C.pending_updates() == left

    def test_views_and_reads_of_gradients_run_nothing(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, _ = stepped()
        for parameter in model.parameters():
            parameter.detach().t()[0].view(-1)
            parameter.grad.sum()  # type: ignore[union-attr]
        assert _C.pending_updates() == 4

    def test_parameters_that_the_next_forward_does_not_use(self) -> None:
        def run() -> list[torch.Tensor]:
            torch.manual_seed(0)
            models = [mlp(layers=2), mlp(layers=2)]
            optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], fused=True)
            for step in range(6):
                backward(models[step % 2])
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 3 != 0)
            return on_cpu([*everything(models[0], optimizer), *models[1].parameters()])

        torch_uvm.enable(budget=None)
        wanted = run()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        assert_equal(run(), wanted)


class TestLifetime:
    def test_what_is_dropped_is_freed(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        gc.collect()
        before = torch_uvm.memory_allocated(DEVICE) + torch_uvm.residency_stats()["records"]
        model, optimizer = stepped()
        gone = weakref.ref(first(model))
        assert _C.pending_updates() == 4
        del model, optimizer
        gc.collect()
        assert gone() is None
        assert _C.pending_updates() == 0
        assert torch_uvm.memory_allocated(DEVICE) + torch_uvm.residency_stats()["records"] == before

    def test_without_its_optimizer_a_model_is_up_to_date(self) -> None:
        wanted = at_once()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        del optimizer
        gc.collect()
        assert _C.pending_updates() == 0
        found = on_cpu(list(model.state_dict().values()))
        assert_equal(found, wanted[: len(found)])

    def test_gradients_go_when_their_update_has_run(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        gradient = first(model).grad
        assert gradient is not None
        storage = weakref.ref(gradient.untyped_storage())
        optimizer.zero_grad()
        del gradient
        gc.collect()
        records = torch_uvm.residency_stats()["records"]
        first(model).sum()
        gc.collect()
        assert storage() is None
        assert torch_uvm.residency_stats()["records"] == records - 1

    def test_at_exit(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            torch_uvm.enable(budget="32MiB", optimizer="deferred")
            model = torch.nn.Linear(1024, 1024).to("emu")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            model(torch.ones(2, 1024, device="emu")).sum().backward()
            optimizer.step()
            assert torch_uvm._C.pending_updates() == 1
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )

    def test_children_leave_them_to_the_parent(self, spawn: Spawn) -> None:
        spawn(
            """
            import gc, os
            import torch, torch_uvm
            torch_uvm.enable(budget="32MiB", optimizer="deferred")
            model = torch.nn.Linear(1024, 1024).to("emu")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            model(torch.ones(2, 1024, device="emu")).sum().backward()
            optimizer.step()
            child = os.fork()
            if child == 0:
                torch.ones(3) + 1
                del model, optimizer
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert torch_uvm._C.pending_updates() == 1
            before = model.weight.sum().item()
            assert torch_uvm._C.pending_updates() == 0
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )


class TestNotDeferred:
    """What cannot wait, or might give other bits, runs at once; and it does equal the step at once."""

    @staticmethod
    def check(program: Callable[[], tuple[Optimizer, list[torch.Tensor]]], pending: int = 0) -> None:
        torch_uvm.enable(budget=None, optimizer="in_place")
        torch.manual_seed(0)
        wanted = on_cpu(program()[1])
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        torch.manual_seed(0)
        _optimizer, results = program()
        assert _C.pending_updates() == pending
        assert_equal(on_cpu(results), wanted)

    def steps(
        self, make: Make, model: Callable[[], nn.Module] = mlp
    ) -> Callable[[], tuple[Optimizer, list[torch.Tensor]]]:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            trained = model()
            optimizer = make(trained.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                backward(trained)
                optimizer.step()
                assert _C.pending_updates() == 0
            return optimizer, everything(trained, optimizer)

        return program

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
            lambda p: torch.optim.ASGD(p, lr=0.01),
            lambda p: torch.optim.Rprop(p, lr=0.01),
        ],
        ids=["rate in a tensor", "ASGD", "Rprop"],
    )
    def test_kinds(self, make: Make) -> None:
        self.check(self.steps(make))

    def test_small_parameters(self) -> None:
        self.check(self.steps(OPTIMIZERS["adamw foreach"], lambda: nn.Sequential(*mlp(512, 1)[2:])))  # type: ignore[index]

    def test_without_a_budget(self) -> None:
        torch_uvm.enable(budget=None, optimizer="deferred")
        stepped()
        assert _C.pending_updates() == 0

    def test_with_a_budget_that_sleeps(self) -> None:
        torch_uvm.enable(budget="auto", optimizer="deferred")
        stepped()
        assert _C.pending_updates() == 0

    def test_with_the_switch_off(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        with torch_uvm.disabled():
            backward(model)
            optimizer.step()
            assert _C.pending_updates() == 0

    def test_differentiable(self) -> None:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            leaf = torch.randn(512, 512).to("emu").requires_grad_()
            x = leaf.clone()
            optimizer = torch.optim.SGD([x], lr=0.5, differentiable=True)
            x.grad = leaf * 3
            optimizer.step()
            x.square().sum().backward()
            assert leaf.grad is not None
            return optimizer, [x, leaf.grad]

        self.check(program)

    def test_complex_parameters(self) -> None:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            x = torch.randn(300, 300, dtype=torch.complex64).to("emu").requires_grad_()
            optimizer = torch.optim.Adam([x], foreach=True)
            for _ in range(3):
                optimizer.zero_grad()
                (x * x.conj()).real.sum().backward()
                optimizer.step()
            return optimizer, [x]

        self.check(program)

    def test_kernels_for_lists_that_take_another_way_for_all(self) -> None:
        """A gradient of other strides has all of its list go the slow way."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            model = mlp()
            optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
            backward(model)
            gradient = first(model).grad
            assert gradient is not None
            first(model).grad = gradient.t().contiguous().t()
            optimizer.step()
            return optimizer, everything(model, optimizer)

        self.check(program)

    def test_parameters_that_share_their_bytes(self) -> None:
        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            flat = torch.randn(4, 512, 512).to("emu")
            parameters = [nn.Parameter(part) for part in flat]
            optimizer = torch.optim.AdamW(parameters, foreach=True)
            for _ in range(2):
                torch.stack([p.square().sum() for p in parameters]).sum().backward()
                optimizer.step()
            return optimizer, [flat]

        self.check(program)

    def test_gradients_that_share_their_bytes(self) -> None:
        """As DistributedDataParallel's do. They are only read."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            parameters = [nn.Parameter(torch.randn(512, 512).to("emu")) for _ in range(3)]
            optimizer = torch.optim.AdamW(parameters, fused=True)
            bucket = torch.randn(3, 512, 512).to("emu")
            for parameter, part in zip(parameters, bucket, strict=True):
                parameter.grad = part
            optimizer.step()
            bucket.zero_()
            optimizer.step()
            return optimizer, [*parameters]

        self.check(program, pending=3)

    def test_what_is_held(self) -> None:
        """Somebody may have its address."""
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        model, optimizer = stepped()
        with torch_uvm.resident(first(model)):
            before = bytes_at(first(model).data_ptr(), first(model))
            backward(model)
            held = first(model).data_ptr()
            optimizer.step()
            assert _C.pending_updates() == 3
            after = bytes_at(held, first(model))
            assert not torch.equal(before, after)
            assert torch.equal(after, bytes_at(first(model).data_ptr(), first(model)))

    def test_what_was_moved_to_the_cpu(self) -> None:
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        model, optimizer = stepped()
        here = torch_uvm.to(first(model).detach(), "cpu")
        backward(model)
        before = here.clone()
        optimizer.step()
        assert _C.pending_updates() == 3
        torch.accelerator.synchronize()
        assert not torch.equal(here, before)

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_scaler_of_gradients(self, fused: bool) -> None:
        """A fused step is given the scale and what was found; others are not called where something was."""

        def program() -> tuple[Optimizer, list[torch.Tensor]]:
            model = mlp()
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            scaler = torch.amp.GradScaler("emu", init_scale=1024.0, growth_interval=2)
            for step in range(5):
                optimizer.zero_grad()
                loss = model(batch()).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            return optimizer, [*everything(model, optimizer), torch.tensor(scaler.get_scale())]

        self.check(program, pending=0 if fused else 4)

    def test_functions_called_by_hand(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        x, gradient = torch.ones(512, 512, device="emu"), torch.ones(512, 512, device="emu")
        run = threading.Thread(  # a thread that has made no step
            target=lambda: importlib.import_module("torch.optim.sgd").sgd(
                [x], [gradient], [], lr=1.0, momentum=0, dampening=0, nesterov=False, maximize=False,
                weight_decay=0, foreach=True,
            )
        )  # fmt: skip
        run.start()
        run.join()
        assert _C.pending_updates() == 0
        assert x.sum().item() == 0


class TestSteps:
    def test_hooks_run_at_the_step(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        seen: list[tuple[str, int]] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(("before", _C.pending_updates())))
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", _C.pending_updates())))
        backward(model)
        optimizer.step()
        assert seen == [("before", 0), ("after", 4)]

    def test_a_closure(self) -> None:
        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizer = OPTIMIZERS["sgd"](model.parameters())

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                return backward(model)

            losses: list[Any] = [optimizer.step(closure) for _ in range(4)]  # type: ignore[arg-type]
            return on_cpu([*losses, *model.parameters()])

        torch_uvm.enable(budget=None)
        wanted = program()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        assert_equal(program(), wanted)

    def test_a_gradient_accumulated_over_batches(self) -> None:
        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizer = OPTIMIZERS["adamw fused"](model.parameters())
            for step in range(9):
                backward(model)
                if step % 3 == 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step < 6)
            return on_cpu(everything(model, optimizer))

        torch_uvm.enable(budget=None)
        wanted = program()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        assert_equal(program(), wanted)

    def test_under_modes_of_the_thread_that_looks(self) -> None:
        """Autocast, inference, a default device, and hooks on saved tensors are not the update's."""

        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = mlp()
            optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
            results = []
            for _ in range(3):
                with torch.autocast("emu", torch.bfloat16), torch.device("cpu"):
                    loss = model(batch()).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.inference_mode(), torch.autocast("emu", torch.bfloat16):
                    results.append(model(batch()).float())
            return on_cpu([*results, *everything(model, optimizer)])

        torch_uvm.enable(budget=None)
        wanted = program()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        assert_equal(program(), wanted)


class TestFailures:
    @pytest.fixture
    def failing(self) -> Iterator[dict[str, int]]:
        """The kernel of one of the step's operators: raises while `failing["times"]` lasts."""
        left = {"times": 0, "calls": 0}

        def square_roots(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            left["calls"] += 1
            if left["times"] > 0:
                left["times"] -= 1
                raise ArithmeticError("on purpose")
            return [tensor.sqrt() for tensor in tensors]

        library = torch.library.Library("aten", "IMPL")
        library.impl("_foreach_sqrt", square_roots, "PrivateUse1")
        yield left
        library._destroy()

    def test_neither_lost_nor_done_twice(self, failing: dict[str, int]) -> None:
        wanted = at_once(OPTIMIZERS["adamw foreach"])
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped(OPTIMIZERS["adamw foreach"])
        failing["times"] = 1000  # what an operator calls tries again
        with pytest.raises(RuntimeError, match="deferred failed: .*on purpose"):
            first(model).sum()
        assert _C.pending_updates() == 4
        failing["times"] = 1
        assert_equal(on_cpu(everything(model, optimizer)), wanted)
        assert _C.pending_updates() == 0

    def test_told_by_the_next_step(self, failing: dict[str, int]) -> None:
        wanted = at_once(OPTIMIZERS["adamw foreach"])
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped(OPTIMIZERS["adamw foreach"])
        failing["times"] = 2
        with pytest.raises(Exception, match="on purpose"):
            optimizer.step()  # the first of them is tried first
        with pytest.raises(Exception, match="on purpose"):
            _C.flush_all_pending()
        assert _C.pending_updates() == 1  # the others were run
        assert_equal(on_cpu(everything(model, optimizer)), wanted)


class TestThreads:
    def test_four_train_at_once(self) -> None:
        count = 4

        def program() -> list[torch.Tensor]:
            torch.manual_seed(0)
            models = [mlp(512, 3) for _ in range(count)]
            batches = [torch.randn(5, 32, 512) for _ in range(count)]
            optimizers: list[Optimizer] = []
            for number, model in enumerate(models):
                kind = ("adamw fused", "adamw foreach", "sgd momentum", "adamw loop")[number]
                optimizers.append(OPTIMIZERS[kind](model.parameters()))
            failures: list[BaseException] = []

            def train(number: int) -> None:
                try:
                    for each in batches[number]:
                        models[number](each.to("emu")).square().mean().backward()
                        optimizers[number].step()
                        optimizers[number].zero_grad()
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=train, args=(number,)) for number in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == []
            pairs = zip(models, optimizers, strict=True)
            return on_cpu([value for pair in pairs for value in everything(*pair)])

        torch_uvm.enable(budget=None)
        wanted = program()
        torch_uvm.enable(budget=20 * MIB, optimizer="deferred")
        assert_equal(program(), wanted)

    def test_all_look_at_the_same_parameters(self) -> None:
        wanted = at_once()
        wanted = wanted[: len(wanted) - 30]
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        for _ in range(5):
            model, _optimizer = stepped()
            parameters = list(model.state_dict().values())
            start = threading.Barrier(4)
            seen: list[list[torch.Tensor]] = [[] for _ in range(4)]

            def read(number: int, start: Any = start, parameters: Any = parameters, seen: Any = seen) -> None:
                start.wait()
                seen[number] = on_cpu(parameters)

            threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for found in seen:
                assert_equal(found, wanted[: len(found)])


class TestStreams:
    """Who waits for the step's stream after the step has its results, whenever the updates run."""

    STEPS = """
        import ctypes
        torch_uvm.enable(budget="10MiB", optimizer="deferred")
        layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3)).to("emu")
        optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
        side, other = emu.Stream(), emu.Stream()
        expected = [p.detach().cpu() for p in layers.parameters()]
        mirror = torch.optim.AdamW(expected, foreach=True)
        flags = 0
        for step in range(3):
            for p, e in zip(layers.parameters(), expected):
                e.grad = torch.full_like(e, step + 1.0)
                p.grad = torch.full_like(p, step + 1.0)
            mirror.step()
            side.wait_stream(emu.current_stream())
            with side:
                optimizer.step()
            assert torch_uvm._C.pending_updates() == 3
            other.wait_stream(side)
            emu.current_stream().wait_stream(side)
            optimizer.zero_grad()
            if step == 1:
                torch.accelerator.synchronize()
                weight = layers[0].weight
                address = weight.data_ptr()  # the host has waited: it may read
                copy = torch.empty(512, 512)
                ctypes.memmove(copy.data_ptr(), address, copy.nbytes)
                flags |= 4 * (not torch.equal(copy, expected[0]))
            first = [p.detach().sum() for p in layers.parameters()]  # runs the updates, on `side`
            with other:
                found = [p.detach().cpu() for p in layers.parameters()]
            emu.current_stream().wait_stream(other)
            side.wait_stream(other)
            flags |= 1 * (not all(map(torch.equal, found, expected)))
            sums = torch.stack([e.sum() for e in expected])
            flags |= 2 * (not torch.allclose(torch.stack(first).cpu(), sums))
        return flags
    """

    def test_a_step_on_one_stream_and_looks_on_others(self, spawn: Spawn) -> None:
        assert across_seeds(spawn, textwrap.indent(textwrap.dedent(self.STEPS), " " * 4), count=12) == 0


class TestOptions:
    def test_the_environment(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            assert torch_uvm.deferred.chosen() == "deferred"
            model = torch.nn.Linear(1024, 1024).to("emu")
            optimizer = torch.optim.SGD(model.parameters())
            model(torch.ones(2, 1024, device="emu")).sum().backward()
            optimizer.step()
            assert torch_uvm._C.pending_updates() == 1
            torch_uvm.enable(budget="1GiB")  # says nothing of optimizers
            assert torch_uvm.deferred.chosen() == "deferred"
            torch_uvm.enable(optimizer="in_place")
            assert torch_uvm.deferred.chosen() == "in_place"
            """,
            env={
                "TORCH_UVM": "1",
                "TORCH_UVM_DEVICE": "emu",
                "TORCH_UVM_CONF": "optimizer:deferred,budget:64MiB",
            },
        )

    def test_the_command_line(self, spawn: Spawn) -> None:
        script = spawn.folder / "script.py"
        script.write_text("import torch_uvm\nprint(torch_uvm.deferred.chosen())\n")
        done = spawn(args=["-m", "torch_uvm", "run", "--optimizer", "deferred", str(script)])
        assert done.stdout.strip() == "deferred"
        done = spawn(args=["-m", "torch_uvm", "run", "--optimizer", "later", str(script)], check=False)
        assert done.returncode == 2
        assert "optimizer='later'" in done.stderr

    @pytest.mark.parametrize(
        ("wrong", "error"), [("later", ValueError), (True, TypeError), (None, TypeError)]
    )
    def test_what_is_refused(self, wrong: Any, error: type[Exception]) -> None:
        torch_uvm.enable(optimizer="deferred")
        with pytest.raises(error, match=r'optimizer.*accepted: "in_place" or "deferred"'):
            torch_uvm.enable(optimizer=wrong)
        assert torch_uvm.deferred.chosen() == "deferred"
