"""Programs under a budget: results are those without one, to the last bit, and the device never holds more.

Each program runs twice on the emulated accelerator, without a budget and with one that is smaller than
what it uses; the figures of both the library and the emulated driver must stay below it.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _models import Gpt
from _spawn import Spawn
from torch import nn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
DEVICE = torch.device("emu", 0)

Program = Callable[[], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def no_budget_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    _C.request_budget(None, None)
    torch_uvm.empty_cache()


def run(program: Program, budget: int | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """What the program returned, and the figures of its run; it leaves no tensor behind on the device."""
    gc.collect()
    torch_uvm.empty_cache()
    torch_uvm.reset_peak_memory_stats()
    torch_uvm.enable(budget=budget)
    torch_uvm.reset_residency_stats()
    torch_uvm.emulated.reset_counters()
    torch.manual_seed(0)
    results = [result.detach().cpu() for result in program()]
    figures = torch_uvm.residency_stats()
    figures["used"] = torch_uvm.max_memory_allocated(DEVICE)
    figures["resident"] = torch_uvm.emulated.max_resident_bytes(DEVICE)
    torch_uvm.set_budget(None)
    return results, figures


def check(program: Program, share: float = 0.6, least: int = 8 * MIB) -> dict[str, Any]:
    """Runs the program in a `share` of what it uses, at least `least` bytes; the figures under the budget."""
    expected, plain = run(program, None)
    budget = max(int(plain["used"] * share), least)
    assert budget < plain["used"], "the program fits: nothing would be tested"
    results, figures = run(program, budget)
    assert len(results) == len(expected) > 0
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(result, wanted), number
    if figures["over_budget"] == 0:
        assert figures["peak_device_bytes"][DEVICE] <= budget
        assert figures["resident"] <= budget
    assert figures["device_bytes"][DEVICE] <= budget  # kept again after an operator that could not
    assert figures["written_back"]["bytes"] > 0
    return figures


# --- models of some 20 MiB of parameters, where the small ones of _models.py would fit anywhere


def mlp(width: int = 768, layers: int = 6) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def cnn() -> nn.Module:
    def block(wide: int, wider: int) -> list[nn.Module]:
        return [nn.Conv2d(wide, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *block(3, 64), nn.MaxPool2d(2), *block(64, 256), nn.MaxPool2d(2), *block(256, 256), *block(256, 256),
        *block(256, 256), *block(256, 256), *block(256, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip


def gpt(checkpointed: bool = False) -> nn.Module:
    return Gpt(checkpointed, width=384)


def vectors(batch: int = 64) -> torch.Tensor:
    return torch.randn(batch, 768)


def images(batch: int = 16) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16)


def tokens(batch: int = 16) -> torch.Tensor:
    return torch.randint(0, 10, (batch, 16))


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().cpu() for value in model.state_dict().values()]


def training(
    make_model: Callable[[], nn.Module],
    make_input: Callable[..., torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    steps: int = 5,
    accumulate: int = 1,
    sizes: list[int] | None = None,
    evaluate: bool = False,
    **options: Any,
) -> Program:
    """An ordinary training loop; returns its losses and its last parameters."""

    def program() -> list[torch.Tensor]:
        model = make_model().to("emu")
        optimize = optimizer(model.parameters(), lr=0.01, **options)
        results = []
        for step in range(steps):
            for _ in range(accumulate):
                batch = make_input(sizes[step % len(sizes)]) if sizes else make_input()
                output = model(batch.to("emu"))
                target = torch.randint(0, 10, (len(output),)).to("emu")
                loss = F.cross_entropy(output, target) / accumulate
                loss.backward()
                results.append(loss.detach().cpu())
            optimize.step()
            optimize.zero_grad()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    results.append(model(make_input().to("emu")).cpu())
                model.train()
        return results + parameters(model)

    return program


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "mlp": (mlp, vectors),
    "cnn": (cnn, images),
    "gpt": (gpt, tokens),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "adamw loop": {"optimizer": torch.optim.AdamW, "foreach": False},
    "adamw foreach": {"optimizer": torch.optim.AdamW, "foreach": True},
    "adamw fused": {"optimizer": torch.optim.AdamW, "fused": True},
}


class TestTraining:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_the_run_without_a_budget(self, kind: str, optimizer: str) -> None:
        check(training(*KINDS[kind], **OPTIMIZERS[optimizer]))

    @pytest.mark.parametrize("share", [0.85, 0.4])
    def test_in_more_and_in_less(self, share: float) -> None:
        check(training(mlp, vectors, **OPTIMIZERS["adamw loop"]), share)

    def test_checkpointing(self) -> None:
        check(training(lambda: gpt(checkpointed=True), tokens, **OPTIMIZERS["adamw loop"]))

    def test_gradient_accumulation(self) -> None:
        check(training(mlp, vectors, accumulate=3, **OPTIMIZERS["adamw foreach"]))

    def test_evaluation_between_steps(self) -> None:
        check(training(mlp, vectors, evaluate=True, **OPTIMIZERS["adamw loop"]))

    def test_shapes_that_change_each_step(self) -> None:
        sizes = [64, 300, 17, 511, 130, 1, 257]
        check(training(mlp, vectors, steps=9, sizes=sizes, **OPTIMIZERS["adamw foreach"]))

    def test_repeated_steps_come_as_planned(self) -> None:
        figures = check(training(mlp, vectors, steps=12, **OPTIMIZERS["adamw foreach"]))
        assert figures["plan_hits"] > figures["plan_misses"]


class TestInference:
    def test_equal_layers_are_one_step(self) -> None:
        """Of weights that do not fit those are fetched that have to be, and not all of them."""
        layers, width, passes = 24, 512, 6
        fetched = 0

        def program() -> list[torch.Tensor]:
            nonlocal fetched
            model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to("emu")
            results, before = [], 0
            with torch.no_grad():
                for number in range(2 * passes):
                    if number == passes:
                        before = torch_uvm.residency_stats()["fetched"]["bytes"]
                    results.append(model(torch.ones(8, width, device="emu")).cpu())
            fetched = torch_uvm.residency_stats()["fetched"]["bytes"] - before
            return results

        check(program, 0.5)
        assert 0 < fetched < 0.75 * passes * layers * width * width * 4


class TestControlFlow:
    def test_branches(self) -> None:
        """Which layers run, and how often, depends on the step."""

        def program() -> list[torch.Tensor]:
            torch.manual_seed(3)
            layers = nn.ModuleList(nn.Linear(768, 768) for _ in range(8)).to("emu")
            optimize = torch.optim.AdamW(layers.parameters(), lr=0.01, foreach=True)
            results = []
            for step in range(10):
                x = vectors().to("emu")
                for number, layer in enumerate(layers):
                    if (step * 7 + number * 3) % 4:
                        x = torch.relu(layer(x)) if (step + number) % 3 else x + layer(x)
                loss = x.square().mean()
                if step % 4 == 3:
                    loss = loss + next(layers[step % 8].parameters()).square().mean()
                loss.backward()
                optimize.step()
                optimize.zero_grad(set_to_none=step % 2 == 0)
                results.append(loss.detach())
            return results + parameters(layers)

        check(program)

    def test_two_models_interleaved(self) -> None:
        def program() -> list[torch.Tensor]:
            models = [mlp(layers=3).to("emu"), gpt().to("emu")]
            optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True) for model in models]
            results = []
            for step in range(8):
                which = (0, 1, 1, 0, 1)[step % 5]
                batch = (vectors, tokens)[which]().to("emu")
                output = models[which](batch)
                loss = F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device="emu"))
                loss.backward()
                optimizers[which].step()
                optimizers[which].zero_grad()
                results.append(loss.detach())
            return results + parameters(models[0]) + parameters(models[1])

        check(program)

    def test_exceptions_inside_backward(self) -> None:
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
                ctx.fail = fail
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
                if ctx.fail:
                    raise ArithmeticError("on purpose")
                return gradients[0] * 1, None

        def program() -> list[torch.Tensor]:
            layers = list(mlp(layers=3).children())
            first, second = nn.Sequential(*layers[:-1]).to("emu"), mlp(layers=3).to("emu")
            both = [*first.parameters(), *second.parameters()]
            optimize = torch.optim.AdamW(both, lr=0.01, foreach=True)
            results, failures = [], 0
            for step in range(8):
                middle: Any = Fails.apply  # untyped in torch
                output = second(middle(first(vectors().to("emu")), step in (2, 3, 6)))
                try:
                    output.square().mean().backward()
                except ArithmeticError:
                    failures += 1
                    optimize.zero_grad()
                    continue
                optimize.step()
                optimize.zero_grad()
                results.append(output)
            assert failures == 3
            return results + parameters(first) + parameters(second)

        check(program)

    def test_four_threads_training_at_once(self) -> None:
        count = 4

        def program() -> list[torch.Tensor]:
            models = [mlp(512, layers=4).to("emu") for _ in range(count)]
            batches = [torch.randn(4, 32, 512) for _ in range(count)]
            results: list[list[torch.Tensor]] = [[] for _ in range(count)]
            failures: list[BaseException] = []

            def train(number: int) -> None:
                try:
                    model = models[number]
                    optimize = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=number % 2 == 0)
                    for batch in batches[number]:
                        loss = model(batch.to("emu")).square().mean()
                        loss.backward()
                        optimize.step()
                        optimize.zero_grad()
                        results[number].append(loss.detach().cpu())
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=train, args=(number,)) for number in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == []
            return [loss for each in results for loss in each] + [
                value for model in models for value in parameters(model)
            ]

        check(program, share=0.6)


# --- code that PyTorch does not run


@torch.library.custom_op("torch_uvm_tests::by_address", mutates_args=("x",))
def by_address(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Reads and writes `x` (float32, contiguous) and its result through bare addresses."""
    result = torch.empty_like(x)
    there, here = _floats(result), _floats(x)
    for index in range(x.numel()):
        there[index] = here[index] * factor
        here[index] += 1.0
    return result


def _floats(x: torch.Tensor) -> Any:
    return ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float * x.numel())).contents


class TestForeignCode:
    def test_a_custom_operator_that_takes_addresses(self) -> None:
        def program() -> list[torch.Tensor]:
            small = torch.arange(512.0, device="emu").repeat(256)  # 512 KiB
            rest = [torch.full((MIB // 2,), float(i), device="emu") for i in range(10)]
            results = []
            for step in range(3):
                scaled = by_address(small, step + 0.5)
                rest = [other * 2 + scaled.sum() for other in rest]
                results += [scaled, small.clone()]
            return results + rest

        check(program, share=0.4)

    def test_a_c_function_that_is_given_an_address(self) -> None:
        """It writes, too, and nobody announces that."""
        memmove = ctypes.CDLL(None).memmove
        memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

        def program() -> list[torch.Tensor]:
            rest = [torch.full((MIB // 2,), float(i), device="emu") for i in range(12)]
            results = []
            for step in range(12):
                source, target = rest[step], rest[(step * 5 + 1) % 12]
                source.sum()  # only read: a copy on the host stays good
                torch.accelerator.synchronize()
                bytes_of_both = source.untyped_storage().nbytes() // 2
                # Addresses of two tensors, and no operator between.
                memmove(target.data_ptr(), source.data_ptr(), bytes_of_both)
                results.append(torch.stack([other.double().sum() for other in rest]))
                rest[(step + 3) % 12] += 1
            return results + rest

        check(program, share=0.4)

    def test_numpy_on_a_cpu_label(self) -> None:
        def program() -> list[torch.Tensor]:
            table = torch.randn(1024, 768, device="emu")  # 3 MiB, from both sides
            array = torch_uvm.to(table, "cpu").numpy()
            model = mlp(layers=6).to("emu")
            optimize = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
            results = []
            for step in range(6):
                rows = slice(step * 64, step * 64 + 64)
                array[rows] *= 0.5  # the host writes what the device reads
                loss = model(table[rows]).square().mean()
                loss.backward()
                optimize.step()
                optimize.zero_grad()
                with torch.no_grad():
                    table[rows] += 1  # the device writes what the host reads
                torch.accelerator.synchronize()
                results += [loss.detach(), torch.from_numpy(array[rows].copy())]
            return [*results, table]

        check(program)

    def test_copies_to_and_from_the_host(self) -> None:
        def program() -> list[torch.Tensor]:
            model = mlp(layers=5).to("emu")
            optimize = torch.optim.SGD(model.parameters(), lr=0.01)
            best, results = {}, []
            for step in range(6):
                loss = model(vectors().to("emu")).square().mean()
                loss.backward()
                optimize.step()
                optimize.zero_grad()
                if step == 2:
                    best = {name: value.cpu() for name, value in model.state_dict().items()}
                if step == 4:
                    model.load_state_dict(best)
                results.append(loss.detach())
            return results + parameters(model) + list(best.values())

        check(program)


class TestLargerThanTheBudget:
    def test_a_batch_four_times_the_usual_once(self) -> None:
        """With "auto", a soft budget: it completes, and results are the same."""
        program = training(mlp, vectors, steps=6, sizes=[128, 128, 512, 128], **OPTIMIZERS["adamw foreach"])
        expected, _ = run(program, None)
        torch_uvm.enable(budget="auto")
        results, _ = run(program, "auto")  # type: ignore[arg-type]
        assert all(map(torch.equal, results, expected))

    def test_an_operator_that_exceeds_a_hard_budget_alone(self) -> None:
        """Its operands are used on the host, where that is possible."""

        def program() -> list[torch.Tensor]:
            parts = [torch.full((MIB,), float(i), device="emu") for i in range(4)]  # 16 MiB
            for _ in range(3):
                torch._foreach_add_(parts, 1.0)
            return parts

        expected, _ = run(program, None)
        results, figures = run(program, 10 * MIB)
        assert all(map(torch.equal, results, expected))
        assert figures["resident"] <= 10 * MIB >= figures["peak_device_bytes"][DEVICE]
        assert figures["used_in_place"]["count"] > 0

    def test_a_result_that_exceeds_a_hard_budget(self) -> None:
        """It has no other place: while it is made the budget is exceeded, and that is counted."""
        torch_uvm.empty_cache()
        torch_uvm.enable(budget=8 * MIB)
        torch_uvm.reset_residency_stats()
        kept = [torch.full((MIB // 2,), float(i), device="emu") for i in range(6)]
        assert torch_uvm.residency_stats()["over_budget"] == 0
        assert (torch.ones(4, MIB, device="emu") == 1).all().item()  # 16 MiB
        assert torch_uvm.residency_stats()["over_budget"] > 0
        for number, each in enumerate(kept):
            assert (each == number).all().item()
        assert torch_uvm.residency_stats()["device_bytes"][DEVICE] <= 8 * MIB

    def test_at_the_hosts_limit(self, spawn: Spawn) -> None:
        """Nothing more can leave the device: out of memory, and what is there stays right."""
        spawn(
            """
            import torch, torch_uvm
            MIB = 1024**2
            torch_uvm.enable(budget=64 * MIB)
            kept = []
            try:
                for number in range(100):
                    kept.append(torch.full((MIB,), float(number), device="emu"))  # 4 MiB each
            except torch.OutOfMemoryError as error:
                assert "budget" in str(error), error
            assert (64 + 96) // 4 >= len(kept) > 64 // 4, len(kept)
            assert 0 < torch_uvm.residency_stats()["host_bytes"] <= 96 * MIB
            kept.pop()  # what looks at the others needs room, too
            for number, each in enumerate(kept):
                assert (each == number).all().item(), number
            del kept
            torch_uvm._C.set_option("host_limit", "none")
            kept = [torch.ones(MIB, device="emu") for _ in range(60)]
            """,
            env={"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": "host_limit:96MiB"},
        )


class TestFork:
    def test_children_of_a_process_that_trains(self, spawn: Spawn) -> None:
        """They let go of what the parent has under a budget, whoever held the engine's mutex then."""
        spawn(
            """
            import gc, os, threading
            import torch, torch_uvm

            torch_uvm.enable(budget="8MiB")
            kept = [torch.full((1 << 20,), float(i), device="emu") for i in range(6)]  # 24 MiB
            stop = threading.Event()

            def work():
                while not stop.is_set():
                    for each in kept:
                        each.add_(1)

            thread = threading.Thread(target=work)
            thread.start()
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    kept.clear()
                    gc.collect()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            stop.set()
            thread.join()
            assert len({each[0].item() - number for number, each in enumerate(kept)}) == 1
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
            timeout=120,
        )
