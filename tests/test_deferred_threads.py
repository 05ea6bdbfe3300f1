"""Deferred steps in several threads and on several streams."""

from __future__ import annotations

import io
import threading
from functools import partial
from typing import Any

import pytest
import torch
from _deferred import (
    BUDGET,
    MIB,
    OPTIMIZERS,
    Optimizer,
    assert_deferred_bits,
    assert_equal,
    at_once,
    backward,
    everything,
    first,
    mlp,
    on_cpu,
    stepped,
)
from _schedules import across_seeds
from _spawn import Spawn
from _threads import in_threads

import torch_uvm
from torch_uvm._patches import pointer_escapes

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")


class TestThreads:
    def test_a_step_defers_right_before_an_address_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As another thread's step may, once the update was run: `torch.save` reads such addresses."""
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        give_out, steps = pointer_escapes._gives_out, iter(range(2))

        def then_step(x: Any) -> None:
            give_out(x)
            if next(steps, None) is not None:
                backward(model)
                optimizer.step()

        monkeypatch.setattr(pointer_escapes, "_gives_out", then_step)
        torch.save(first(model), io.BytesIO())
        assert next(steps, None) is None

    def test_a_checkpoint_is_written_while_another_thread_trains(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        done = threading.Event()

        def train() -> None:
            for _ in range(20):
                backward(model)
                optimizer.step()
            done.set()

        trains = threading.Thread(target=train)
        trains.start()
        while not done.is_set():
            torch.save(model.state_dict(), io.BytesIO())
        trains.join()

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

            def train(number: int) -> None:
                for each in batches[number]:
                    models[number](each.to("emu")).square().mean().backward()
                    optimizers[number].step()
                    optimizers[number].zero_grad()

            in_threads(*(partial(train, number) for number in range(count)))
            pairs = zip(models, optimizers, strict=True)
            return on_cpu([value for pair in pairs for value in everything(*pair)])

        assert_deferred_bits(program, 20 * MIB)

    def test_all_threads_access_the_same_parameters(self) -> None:
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

            in_threads(*(partial(read, number) for number in range(4)))
            for found in seen:
                assert_equal(found, wanted[: len(found)])


class TestStreams:
    """After a wait for the step's stream, the step's results are visible, whenever the updates run."""

    STEPS = """
        import ctypes
        torch_uvm.enable(budget="10MiB", optimizer="deferred")
        library = torch.library.Library("aten", "IMPL")
        copied = []

        def addcdiv(tensors, left, right, scalars):
            # Kernels of the emulated accelerator are synchronous. This delayed copy stands for a GPU's
            # kernel.
            results = torch._foreach_addcdiv(tensors, left, right, scalars)
            for tensor, result in zip(tensors, results):
                copied.append(result.cpu().pin_memory())  # kept alive: freeing it would wait for the copy
                tensor.copy_(copied[-1], non_blocking=True)

        library.impl("_foreach_addcdiv_.ScalarList", addcdiv, "PrivateUse1")
        layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(3)).to("emu")
        optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
        side, other = emu.Stream(), emu.Stream()
        expected = [p.detach().cpu() for p in layers.parameters()]
        mirror = torch.optim.AdamW(expected, foreach=True)

        def differ(stream):
            with stream:  # the last write first: it is the most likely to be pending
                found = [layer.weight.detach().cpu() for layer in reversed(layers)]
            return not all(map(torch.equal, found, expected[::-1]))

        flags = 0
        for look in ("another stream", "the host", "the stream that runs them", "no budget any more"):
            main = emu.current_stream()
            for p, e in zip(layers.parameters(), expected):
                e.grad = torch.randn_like(e)
                p.grad = e.grad.to("emu")
            mirror.step()
            side.wait_stream(main)
            with side:
                optimizer.step()
            assert torch_uvm._C.pending_updates() == 3
            for stream in (main, other):
                stream.wait_stream(side)
            optimizer.zero_grad()
            if look == "the host":
                torch.accelerator.synchronize()  # so the host may read at an address
            if look != "no budget any more":
                torch_uvm._C.flush_all_pending()  # runs them on `side`, without a wait
            else:
                torch_uvm.set_budget(None)
                flags |= 32 * (not side.query())  # none would wait: no operator is observed now
            assert torch_uvm._C.pending_updates() == 0
            if look == "another stream":
                flags |= 1 * differ(other)
            elif look == "the host":
                for layer, e in zip(reversed(layers), expected[::-1]):
                    copy = torch.empty(512, 512)
                    ctypes.memmove(copy.data_ptr(), layer.weight.data_ptr(), copy.nbytes)
                    flags |= 2 * (not torch.equal(copy, e))
            elif look == "the stream that runs them":
                flags |= 4 * differ(main)
            else:
                flags |= 8 * differ(other)
            torch.accelerator.synchronize()
            flags |= 16 * differ(main)
        return flags
    """

    def test_a_step_on_one_stream_and_accesses_on_others(self, spawn: Spawn) -> None:
        assert across_seeds(spawn, self.STEPS, count=8) == 0

    def test_operators_wait_beside_a_thread_that_waits_for_an_address(self, spawn: Spawn) -> None:
        done = spawn("""
import threading
import torch, torch_uvm
from torch_uvm import _C

emu = torch.get_device_module("emu")
torch_uvm.enable(budget="10MiB", optimizer="deferred")
library = torch.library.Library("aten", "IMPL")
copied = []

def addcdiv(tensors, left, right, scalars):
    [tensor], [result] = tensors, torch._foreach_addcdiv(tensors, left, right, scalars)
    copied.append(result.cpu().pin_memory())
    _C.emu_hold_device(0)
    tensor.copy_(copied[-1], non_blocking=True)  # stands for a GPU's kernel that ends after the release

library.impl("_foreach_addcdiv_.ScalarList", addcdiv, "PrivateUse1")
weight = torch.nn.Parameter(torch.ones(512, 512, device="emu"))
expected = weight.detach().cpu()
optimizer, mirror = (torch.optim.AdamW([it], foreach=True) for it in (weight, expected))
expected.grad = torch.randn_like(expected)
weight.grad = expected.grad.to("emu")
mirror.step()
side, other = emu.Stream(), emu.Stream()
with other:
    found = torch.zeros_like(weight)  # the operator below must not allocate: reused memory would make it wait
side.wait_stream(emu.current_stream())
with side:
    optimizer.step()
assert _C.pending_updates() == 1
_C.flush_all_pending()
waits = threading.Thread(target=weight.data_ptr)
waits.start()
_C.emu_await_waiter()
read = threading.Event()

def release():
    read.wait(2)  # an operator that does not wait has read by then
    _C.emu_release_device(0)

releases = threading.Thread(target=release)
releases.start()
with other:
    torch.neg(weight.detach(), out=found)
read.set()
for thread in (waits, releases):
    thread.join()
print(torch.equal(found.cpu(), -expected))
""")
        assert done.stdout.split() == ["True"]
