"""Programs that use hooks, function transforms, threads, several devices, checkpoints and errors."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from typing import Any

import torch
from _programs import Results, program, step, three
from torch import nn
from torch.nn import functional as F


@program
def lbfgs(device: str) -> Results:
    matrix, weights = torch.randn(20, 20).to(device), torch.randn(20).to(device).requires_grad_()
    optimizer = torch.optim.LBFGS([weights], line_search_fn="strong_wolfe", history_size=5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (matrix @ weights - 1).square().sum() + weights.abs().sum()
        loss.backward()
        return loss

    return [*[optimizer.step(closure) for _ in range(4)], weights]


@program
def function_transforms(device: str) -> Results:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    x, target = torch.randn(10, 8).to(device), torch.randint(0, 3, (10,)).to(device)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(model, parameters, (x[None],))
        return F.cross_entropy(output, target[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, target)
    jacobians = [torch.func.jacrev(model)(x[0]), torch.func.jacfwd(model)(x[0])]
    hessian = torch.func.hessian(lambda x: model(x).sum())(x[0])
    return [*each.values(), *jacobians, hessian, *torch.func.jvp(model, (x,), (x,))]


class ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x.clone().mul_(w)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


scale: Any = ScaleFunction.apply


@program
def hooks_and_a_custom_function(device: str) -> Results:
    x, w = torch.randn(5, 4).to(device).requires_grad_(), torch.randn(4).to(device).requires_grad_()
    layer = nn.Linear(4, 4).to(device)
    seen: Results = []
    x.register_hook(lambda gradient: gradient * 2)
    w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    see: Any = lambda _, inputs, __: seen.append(inputs[0].clone())  # noqa: E731
    layer.register_full_backward_hook(see)
    layer.register_forward_hook(lambda _, __, output: output * 1.5)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)):
        first = layer(scale(x, w)).tanh().square().sum()
    with torch.autograd.graph.save_on_cpu():
        second = layer(scale(x, w)).sigmoid().sum()
    (first + second).backward()
    return [x.grad, w.grad, *seen, *[p.grad for p in layer.parameters()]]


@program
def four_threads(device: str) -> Results:
    jobs = [
        (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to(device), torch.randn(4, 6, 8, 16))
        for _ in range(4)
    ]
    results: dict[int, Results] = {}

    def run(number: int) -> None:
        layer, batches = jobs[number]
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)
        losses = [step(optimizer, layer(batch.to(device)).square().mean()) for batch in batches]
        results[number] = [*losses, *layer.parameters()]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [value for number in range(4) for value in results[number]]


@program
def a_model_on_three_devices(device: str) -> Results:
    places = three(device)
    parts: list[Any] = [
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(place) for place in places
    ]
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    losses = []
    for _ in range(4):
        x = torch.randn(32, 64)
        hidden = x
        for part, place in zip(parts, places, strict=True):
            hidden = part(hidden.to(place))
        around = parts[0](x.to(places[0])).to(places[2])
        losses.append(step(optimizer, (hidden + around).square().mean()))
    moved = torch.zeros(64, 64, device=places[2])
    moved[::2].copy_(parts[0][0].weight.detach().t()[1::2])
    return [*losses, *parameters, moved, moved.to(places[1], torch.double)]


@program
def resumed_from_a_checkpoint(device: str) -> Results:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).to(device)
        return model, torch.optim.AdamW(model.parameters(), foreach=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
        batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return [step(optimizer, model(batch.to(device)).square().sum()) for batch in batches]

    model, optimizer = make()
    results: Results = train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for where in (device, "cpu", None):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        model, optimizer = make()
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        results += train(model, optimizer, range(3, 6))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        results += [value for state in copied.state_dict()["state"].values() for value in state.values()]
    return results


class FailsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


fails: Any = FailsFunction.apply


@program
def errors_and_on(device: str) -> Results:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, foreach=True)
    ones = torch.ones(3, device=device)
    results: Results = []
    for _ in range(3):
        output = layer(torch.randn(3, 2, 8).to(device))
        with contextlib.suppress(KeyboardInterrupt):
            fails(output).sum().backward()
        for wrong in (
            lambda: torch.ones(2, 2, device=device) @ torch.ones(3, 3, device=device),
            lambda: ones[torch.tensor([5], device=device)],
            lambda: torch.linalg.cholesky(-torch.eye(3, device=device)),
            lambda: torch.add(ones, 1, out=torch.ones(3, dtype=torch.int, device=device)),
            lambda: layer(torch.ones(3, 2, 9, device=device)),
        ):
            try:
                wrong()
            except Exception as error:
                results.append(type(error).__name__)
        results.append(step(optimizer, layer(torch.randn(3, 2, 8).to(device)).sum()))
    return [*results, *layer.parameters()]
