"""The end of deferred steps: calls that run all pending updates, lifetime of memory, forks, failing
updates."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _deferred import (
    BUDGET,
    DEVICE,
    OPTIMIZERS,
    assert_deferred_bits,
    assert_equal,
    at_once,
    backward,
    bytes_at,
    everything,
    first,
    mlp,
    on_cpu,
    stepped,
)
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C
from torch_uvm._patches import deferred_updates

pytestmark = pytest.mark.usefixtures("steps_at_once_afterwards")


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

    def test_a_budget_that_is_removed_internally(self) -> None:
        """Updates that are pending then still run at the next access."""
        wanted = at_once()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        both = stepped()
        _C.set_budget(0, None)
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

    def test_only_updates_of_accessed_tensors_run(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, _ = stepped()
        for left, layer in zip((3, 2, 1, 0), list(model)[::2], strict=False):  # type: ignore[call-overload]
            layer.weight.sum()
            assert _C.pending_updates() == left

    def test_views_and_reads_of_gradients_run_no_update(self) -> None:
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

        assert_deferred_bits(run)


class TestLifetime:
    def test_dropped_models_are_freed(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        gc.collect()
        before = torch_uvm.memory.memory_allocated(DEVICE) + torch_uvm.stats()["records"]
        model, optimizer = stepped()
        gone = weakref.ref(first(model))
        assert _C.pending_updates() == 4
        del model, optimizer
        gc.collect()
        assert gone() is None
        assert _C.pending_updates() == 0
        assert torch_uvm.memory.memory_allocated(DEVICE) + torch_uvm.stats()["records"] == before

    def test_without_its_optimizer_a_model_is_up_to_date(self) -> None:
        wanted = at_once()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        del optimizer
        gc.collect()
        assert _C.pending_updates() == 0
        found = on_cpu(list(model.state_dict().values()))
        assert_equal(found, wanted[: len(found)])

    def test_gradients_are_freed_after_their_update(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        gradient = first(model).grad
        assert gradient is not None
        storage = weakref.ref(gradient.untyped_storage())
        optimizer.zero_grad()
        del gradient
        gc.collect()
        records = torch_uvm.stats()["records"]
        first(model).sum()
        gc.collect()
        assert storage() is None
        assert torch_uvm.stats()["records"] == records - 1

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

    def test_children_do_not_run_them(self, spawn: Spawn) -> None:
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
                try:
                    model.weight.sum()
                except RuntimeError as error:
                    named = "forked process" in str(error)
                del model, optimizer
                gc.collect()
                os._exit(not named)
            assert os.waitpid(child, 0)[1] == 0
            assert torch_uvm._C.pending_updates() == 1
            before = model.weight.sum().item()
            assert torch_uvm._C.pending_updates() == 0
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )


class TestAddresses:
    """Code that is no operator, and takes an address as C++ extensions do: `_C.address`."""

    def test_are_refused_until_the_update_has_run(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, _optimizer = stepped()
        weight = first(model)
        with pytest.raises(RuntimeError, match="no operator reads its address.*torch_uvm.resident"):
            _C.address(weight)
        weight.sum()
        assert _C.address(weight) == weight.data_ptr()

    def test_are_given_where_residency_is_asked_for(self) -> None:
        (wanted, *_) = at_once()
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, _optimizer = stepped()
        with torch_uvm.resident(first(model)):
            found = bytes_at(_C.address(first(model)), first(model))
        assert torch.equal(found, wanted.view(torch.uint8).flatten())

    def test_what_only_looks_is_not_refused(self) -> None:
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        pending = _C.pending_updates()
        assert pending > 0 and torch_uvm.is_managed(first(model)) and first(model).untyped_storage().nbytes()
        assert sum(torch_uvm.residency(model).values()) > 0
        assert type(copy.copy(first(model))) is torch.nn.Parameter and first(model).detach().shape
        assert _C.pending_updates() == pending
        torch_uvm.prefetch(model)
        assert_equal(on_cpu(everything(model, optimizer)), at_once())

    def test_operators_of_another_thread_are_never_refused(self) -> None:
        """A thread that reads parameters all the time, as in evaluation beside training."""
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped()
        ended = threading.Event()
        failures: list[BaseException] = []

        def read() -> None:
            try:
                while not ended.is_set():
                    for parameter in model.parameters():
                        parameter.detach().sum()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(30):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        ended.set()
        thread.join()
        assert failures == []


@pytest.mark.parametrize("name", ["adamw foreach", "adamw fused", "nadam"])
def test_a_step_that_cannot_be_recorded_is_taken_once_when_tried_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = at_once(OPTIMIZERS[name])
    torch_uvm.enable(budget=BUDGET, optimizer="deferred")
    plain = deferred_updates._Recorder._owner_of
    calls = 0

    def failing(self: Any, *args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(deferred_updates._Recorder, "_owner_of", failing)
    torch.manual_seed(0)
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    for number in range(2):
        backward(model)
        with pytest.raises(KeyboardInterrupt) if number == 0 else contextlib.nullcontext():
            optimizer.step()
        if number == 0:
            optimizer.step()
        optimizer.zero_grad()
    assert_equal(on_cpu(everything(model, optimizer)), wanted)


class TestFailures:
    @pytest.fixture
    def failing(self) -> Iterator[dict[str, int]]:
        """Replaces the kernel of one of the step's operators. It raises while `failing["times"]` is
        positive."""
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

    def test_a_failed_update_is_retried_and_runs_once(self, failing: dict[str, int]) -> None:
        wanted = at_once(OPTIMIZERS["adamw foreach"])
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped(OPTIMIZERS["adamw foreach"])
        failing["times"] = 1000  # callees of an operator retry the update
        with pytest.raises(RuntimeError, match="deferred failed: .*on purpose"):
            first(model).sum()
        assert _C.pending_updates() == 4
        failing["times"] = 1
        assert_equal(on_cpu(everything(model, optimizer)), wanted)
        assert _C.pending_updates() == 0

    def test_the_next_step_reports_the_failure(self, failing: dict[str, int]) -> None:
        wanted = at_once(OPTIMIZERS["adamw foreach"])
        torch_uvm.enable(budget=BUDGET, optimizer="deferred")
        model, optimizer = stepped(OPTIMIZERS["adamw foreach"])
        failing["times"] = 2
        with pytest.raises(Exception, match="on purpose"):
            optimizer.step()  # runs all updates of the step before first
        assert _C.pending_updates() == 2  # the other updates ran
        assert_equal(on_cpu(everything(model, optimizer)), wanted)
