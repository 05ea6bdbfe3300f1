"""Deferred steps of several threads, and on several streams."""

from __future__ import annotations

import textwrap
import threading
from typing import Any

import pytest
import torch
from _deferred import (
    BUDGET,
    MIB,
    OPTIMIZERS,
    Optimizer,
    assert_equal,
    at_once,
    everything,
    mlp,
    on_cpu,
    stepped,
)
from _schedules import across_seeds
from _spawn import Spawn

import torch_uvm

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")


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
