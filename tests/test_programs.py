"""Small programs of the kinds that people run: on the accelerator they end as on the CPU, to the last bit.

The file is a script, too. As one it runs every program on the CPU and on the accelerator, in a process
whose devices are small enough that pages are evicted all the time; the tests look at what it printed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _spawn import Spawn
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import torch_uvm

Results = list[Any]  # tensors, and plain values
Program = Callable[[str], Results]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def three(device: str) -> list[str]:
    return ["cpu"] * 3 if device == "cpu" else [f"{device}:{index}" for index in range(3)]


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(inside, outside, 1, stride)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.one(x)), inplace=True)
        return F.relu(self.norms[1](self.two(inner)) + self.around(x))


@program
def resnet_channels_last(device: str) -> Results:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)
    losses = []
    for _ in range(3):
        images = torch.randn(16, 3, 32, 32).to(device, memory_format=torch.channels_last)
        target = torch.randint(0, 10, (16,)).to(device)
        losses.append(step(optimizer, F.cross_entropy(model(images), target)))
    model.eval()
    return [*losses, model(images), *model.state_dict().values()]


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.SiLU()
        )
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.LeakyReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.out = nn.Sequential(
            nn.Conv2d(32, 16, 3, padding=1, padding_mode="reflect"),
            nn.PReLU(),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(16, 1, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        output: torch.Tensor = self.out(torch.cat([high, self.up(self.low(high))], 1))
        return output


@program
def unet(device: str) -> Results:
    model = Unet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    losses = []
    for _ in range(2):
        x = torch.randn(4, 1, 48, 48).to(device)
        target = F.interpolate((x > 0).float(), scale_factor=2)
        losses.append(step(optimizer, F.binary_cross_entropy_with_logits(model(x), target)))
    return [*losses, *model.parameters()]


@program
def gan_of_two_optimizers(device: str) -> Results:
    generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 256)).to(device)
    critic = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(256, 64)), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    ).to(device)
    ours = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9), foreach=True)
    theirs = torch.optim.RMSprop(critic.parameters(), 1e-3, foreach=True)
    losses = []
    for _ in range(3):
        real, noise = torch.randn(32, 256).to(device), torch.randn(32, 16).to(device)
        fake = generator(noise)
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        losses.append(step(theirs, loss))
        losses.append(step(ours, F.softplus(-critic(fake)).mean()))
    return [*losses, *generator.state_dict().values(), *critic.state_dict().values()]


@program
def moving_averages(device: str) -> Results:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
    mine = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.NAdam(model.parameters(), foreach=True)
    for _ in range(3):
        step(optimizer, model(torch.randn(8, 64).to(device)).square().mean())
        with torch.no_grad():
            torch._foreach_lerp_(list(mine.parameters()), list(model.parameters()), 0.1)
        averaged.update_parameters(model)
    return [*mine.parameters(), *averaged.parameters()]


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
def parametrizations(device: str) -> Results:
    made = nn.utils.parametrizations
    layers = [made.weight_norm(nn.Linear(6, 6)), made.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 6)]
    model = nn.Sequential(*layers).to(device)
    prune.l1_unstructured(model[2], "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    losses = [step(optimizer, model(torch.randn(4, 6).to(device)).square().sum()) for _ in range(3)]
    return [*losses, *model.state_dict().values()]


@program
def speech_with_ctc(device: str) -> Results:
    words, bag = nn.Embedding(50, 16, padding_idx=0, max_norm=1.0), nn.EmbeddingBag(50, 16)
    layer, head = nn.GRU(16, 16, bidirectional=True), nn.Linear(32, 20)
    model = nn.ModuleList([words, bag, layer, head]).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), foreach=True)
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 50, (30, 4)).to(device)
        scores = head(layer(words(tokens) + bag(tokens.T.contiguous()))[0]).log_softmax(-1)
        target = torch.randint(1, 20, (4, 10)).to(device)
        loss = F.ctc_loss(scores, target, torch.full((4,), 30), torch.full((4,), 10))
        losses.append(step(optimizer, loss))
    return [*losses, *model.parameters()]


@program
def compiled(device: str) -> Results:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    losses = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        fast = torch.compile(model, backend=backend)
        losses += [step(optimizer, fast(torch.randn(3, 8).to(device)).square().sum()) for _ in range(2)]
    return [*losses, *model.parameters()]


@program
def traced_and_scripted(device: str) -> Results:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3), nn.Flatten()).to(device)
    x = torch.randn(2, 1, 8, 8).to(device)
    outputs = []
    traced = torch.jit.trace(model, x)
    for run in (traced, torch.jit.script(model)):
        for _ in range(3):
            outputs.append(run(x))
            outputs[-1].square().sum().backward()
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return [*outputs, torch.jit.load(file, map_location=device)(x), *[p.grad for p in model.parameters()]]


@program
def four_threads(device: str) -> Results:
    jobs = [(nn.LSTM(16, 16, 2).to(device), torch.randn(4, 6, 8, 16)) for _ in range(4)]
    results: dict[int, Results] = {}

    def run(number: int) -> None:
        layer, batches = jobs[number]
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)
        losses = [step(optimizer, layer(batch.to(device))[0].square().mean()) for batch in batches]
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
    layer = nn.LSTM(8, 8).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, foreach=True)
    ones = torch.ones(3, device=device)
    results: Results = []
    for _ in range(3):
        output = layer(torch.randn(3, 2, 8).to(device))[0]
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
        results.append(step(optimizer, layer(torch.randn(3, 2, 8).to(device))[0].sum()))
    return [*results, *layer.parameters()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.stride() == other.stride() and torch.equal(one, other)
    return one == other or (math.isnan(one) and math.isnan(other))


def run(function: Program, device: str) -> Results:
    torch.manual_seed(3)
    return [v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in function(device)]


def main(managed: bool) -> None:
    """Prints, for each program, what is wrong with it: nothing, or a traceback or the places that differ."""
    findings = {}
    scope = torch_uvm.enabled if managed else torch_uvm.disabled
    for name, function in PROGRAMS.items():
        try:
            expected = run(function, "cpu")
            with scope():
                found = run(function, "emu")
            pairs = enumerate(zip(expected, found, strict=True))
            differ = [index for index, (one, other) in pairs if not same(one, other)]
            findings[name] = f"results {differ} of {len(expected)} differ" if differ else ""
        except Exception:
            findings[name] = traceback.format_exc()
        findings[name] += torch_uvm._C.check_allocator() or ""
    evicted = torch_uvm.emulated.counters()["evicted_pages"]
    print(json.dumps({"findings": findings, "evicted": evicted}))


CONF = {
    # Copies are delayed, so that one that nobody waits for shows.
    "managed": "emulated_memory:2MiB,emulated_devices:3,emulated_schedule_seed:5",
    "plain": "emulated_memory:128MiB,emulated_devices:3,emulated_schedule_seed:5",
}


@pytest.fixture(scope="module", name="outcomes")
def run_in_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    spawn = Spawn(tmp_path_factory.mktemp("programs"))
    yield {
        how: json.loads(spawn(args=[__file__, how], env={"TORCH_UVM_CONF": conf}).stdout.splitlines()[-1])
        for how, conf in CONF.items()
    }


@pytest.mark.parametrize("how", CONF)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_cpu(outcomes: dict[str, Any], name: str, how: str) -> None:
    assert outcomes[how]["findings"][name] == ""


def test_pages_were_evicted(outcomes: dict[str, Any]) -> None:
    assert outcomes["managed"]["evicted"] > 1000
    assert outcomes["plain"]["evicted"] == 0


def test_a_difference_is_noticed() -> None:
    one = torch.ones(4)
    assert same(one, one.clone())
    assert not same(one, torch.nextafter(one, 2 * one))
    assert not same(1.0, math.nextafter(1.0, 2.0))


class TestOutOfMemory:
    def test_retried_with_smaller_batches(self) -> None:
        torch_uvm.enable(limit="40MiB")
        layer: Any = nn.Linear(256, 256).to("emu")
        batch, failures = 1 << 17, 0
        while True:
            try:
                layer(torch.ones(batch, 256, device="emu")).sum().backward()
                break
            except torch.OutOfMemoryError:
                failures += 1
                batch //= 2
        assert failures >= 2
        assert torch.equal(layer.bias.grad.cpu(), torch.full((256,), float(batch)))


class TestSavedByARecurrentLayer:
    """Programs that shard parameters free a storage after forward and fill it again before backward."""

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


class TestScopes:
    @pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
    def test_profiler_that_ends_inside(self, profile: Callable[[], Any]) -> None:
        profiler = profile().__enter__()
        with torch_uvm.enabled():
            torch.ones(3, device="emu").add(1)
            profiler.__exit__(None, None, None)
            assert torch_uvm.is_enabled()
        assert not torch_uvm.is_enabled()

    def test_profiler_that_starts_inside(self) -> None:
        with torch_uvm.enabled():
            profiler = torch.profiler.profile().__enter__()
        assert not torch_uvm.is_enabled()
        with torch_uvm.enabled():
            pass
        profiler.__exit__(None, None, None)
        assert not torch_uvm.is_enabled()

    def test_generator_closed_by_another_thread(self) -> None:
        def generate() -> Iterator[bool]:
            with torch_uvm.enabled():
                yield torch_uvm.is_enabled()

        generator = generate()
        assert next(generator)
        errors: list[BaseException] = []

        def close() -> None:
            try:
                generator.close()  # type: ignore[attr-defined]
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
        assert not errors
        assert not torch_uvm.is_enabled()

    def test_left_but_not_open(self) -> None:
        with pytest.raises(RuntimeError, match=r"torch_uvm.enabled\(\) is left, but not open"):
            torch_uvm.enabled().__exit__(None, None, None)


if __name__ == "__main__":
    main(sys.argv[1] == "managed")
