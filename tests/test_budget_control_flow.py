"""Programs under a budget whose steps differ: branches, two models, exceptions, threads and forks."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import torch
from _budget_programs import (
    MIB,
    check,
    gpt,
    mlp,
    no_budget_afterwards,  # noqa: F401  (every test has it)
    parameters,
    tokens,
    vectors,
)
from _spawn import Spawn
from _threads import in_threads
from torch import nn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C


class TestControlFlow:
    def test_branches(self) -> None:
        """The layers that run, and their number, depend on the step."""

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

            def train(number: int) -> None:
                model = models[number]
                optimize = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=number % 2 == 0)
                for batch in batches[number]:
                    loss = model(batch.to("emu")).square().mean()
                    loss.backward()
                    optimize.step()
                    optimize.zero_grad()
                    results[number].append(loss.detach().cpu())

            in_threads(*(partial(train, number) for number in range(count)))
            return [loss for each in results for loss in each] + [
                value for model in models for value in parameters(model)
            ]

        check(program, share=0.6)


class TestFork:
    def test_children_of_a_process_that_trains(self, spawn: Spawn) -> None:
        """Children release the parent's storages, even if a thread held the engine's mutex at the fork."""
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


class TestWatching:
    def test_a_thread_remembers_operators_alone(self) -> None:
        """PyTorch also names the nodes of a backward, each time at another address."""

        def run(depth: int) -> None:
            x = torch.ones(4, requires_grad=True)
            if depth:
                x.register_hook(lambda _: run(depth - 1))  # while the outer node has its name
            with torch.enable_grad():
                x.sum().backward()

        torch_uvm.enable(budget=8 * MIB)
        held = [torch.ones(MIB, device="emu") for _ in range(4)]
        run(1)
        known = _C.known_operators()
        run(30)
        assert 0 < _C.known_operators() == known
        assert all(bool(one.eq(1).all()) for one in held)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_a_budget_set_beside_hooks_loses_none_of_them() -> None:
    """Setting it looks for tensors among all objects, also among tuples that PyTorch is filling."""
    torch_uvm.enable(budget=32 * MIB)
    gradients = []

    def work() -> None:
        for _ in range(2000):
            x = torch.ones(MIB // 4, device="emu", requires_grad=True)
            x.register_hook(lambda gradient: gradient * 2)
            Double.apply(x).sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            gradients.append(x.grad[0].item())

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        _C.make_all_known()  # as set_budget does if there are tensors that no operator has used
        time.sleep(0.001)
    thread.join()
    assert gradients == [4.0] * 2000
