"""The switch: process-wide, by scope, in backward threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

import torch_uvm
from torch_uvm import _C

ACCELERATOR = torch.accelerator.current_accelerator()
assert ACCELERATOR is not None
DEVICE = ACCELERATOR.type


def _new() -> torch.Tensor:
    return torch.ones(8, device=DEVICE)


def _on_another_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


class TestProcess:
    def test_is_off_after_import(self) -> None:
        assert not torch_uvm.is_enabled()
        assert not torch_uvm.is_managed(_new())

    def test_decides_about_new_tensors_only(self) -> None:
        before = _new()
        torch_uvm.enable()
        managed = _new()
        torch_uvm.disable()
        after = _new()
        assert [torch_uvm.is_managed(t) for t in (before, managed, after)] == [False, True, False]
        assert (before + managed + after).tolist() == [3.0] * 8

    def test_holds_for_every_thread(self) -> None:
        torch_uvm.enable()
        assert _on_another_thread(torch_uvm.is_enabled)
        assert _on_another_thread(lambda: torch_uvm.is_managed(_new()))

    def test_leaves_cpu_tensors_alone(self) -> None:
        torch_uvm.enable()
        assert not torch_uvm.is_managed(torch.ones(8))

    def test_covers_views_gradients_and_results(self) -> None:
        torch_uvm.enable()
        x = _new().requires_grad_()
        (x * 2).sum().backward()
        assert x.grad is not None
        assert torch_uvm.is_managed(x[2:]) and torch_uvm.is_managed(x.grad) and torch_uvm.is_managed(x * 2)


class TestLimitOfEnable:
    def test_none_leaves_the_limit_as_it_is(self) -> None:
        torch_uvm.set_limit("3GiB")
        torch_uvm.enable()
        assert _C.get_limit() == 3 * 1024**3

    def test_a_number_sets_it(self) -> None:
        torch_uvm.set_limit("3GiB")
        torch_uvm.enable(limit="5GiB")
        assert _C.get_limit() == 5 * 1024**3
        torch_uvm.enable(limit=4096)
        assert _C.get_limit() == 4096

    def test_stays_after_disable_and_goes_with_none(self) -> None:
        torch_uvm.enable(limit="5GiB")
        torch_uvm.disable()
        assert _C.get_limit() == 5 * 1024**3
        torch_uvm.set_limit(None)
        assert _C.get_limit() is None

    @pytest.mark.parametrize("budget", ["auto", None, "1GiB", "80%"])
    def test_budgets_that_are_accepted(self, budget: str | None) -> None:
        torch_uvm.enable(budget=budget, limit="2GiB", moves="copy", host_tensors=False)
        assert torch_uvm.is_enabled()


class TestScopes:
    def test_nest_and_end(self) -> None:
        seen = []
        with torch_uvm.enabled():
            seen.append(torch_uvm.is_managed(_new()))
            with torch_uvm.disabled():
                seen.append(torch_uvm.is_managed(_new()))
                with torch_uvm.enabled():
                    seen.append(torch_uvm.is_managed(_new()))
                seen.append(torch_uvm.is_managed(_new()))
            seen.append(torch_uvm.is_managed(_new()))
        seen.append(torch_uvm.is_managed(_new()))
        assert seen == [True, False, True, False, True, False]

    def test_override_the_process_both_ways(self) -> None:
        torch_uvm.enable()
        with torch_uvm.disabled():
            assert not torch_uvm.is_enabled()
            torch_uvm.enable()
            assert not torch_uvm.is_enabled()
        assert torch_uvm.is_enabled()
        torch_uvm.disable()
        with torch_uvm.enabled():
            torch_uvm.disable()
            assert torch_uvm.is_enabled()
        assert not torch_uvm.is_enabled()

    def test_end_with_an_exception(self) -> None:
        with pytest.raises(KeyError), torch_uvm.enabled():
            raise KeyError
        assert not torch_uvm.is_enabled()

    def test_decorate(self) -> None:
        @torch_uvm.enabled()
        def depth(n: int) -> list[bool]:
            return [torch_uvm.is_enabled()] + (depth(n - 1) if n else [])

        assert depth.__name__ == "depth"
        assert depth(3) == [True] * 4
        assert not torch_uvm.is_enabled()

    def test_hold_for_their_thread(self) -> None:
        with torch_uvm.enabled():
            assert not _on_another_thread(torch_uvm.is_enabled)
        torch_uvm.enable()
        with torch_uvm.disabled():
            assert _on_another_thread(torch_uvm.is_enabled)

    def test_closed_by_another_thread_it_is_removed_by_its_own(self) -> None:
        """One thread starts a generator, and another closes it. Memory that its scope kept alive is freed."""
        before = torch_uvm.memory.memory_allocated()

        def inside() -> Generator[None]:
            with torch_uvm.allocators.use_allocator(torch_uvm.allocators.arena("1MiB")):
                _new()
                yield

        for _ in range(3):
            steps = inside()
            next(steps)
            _on_another_thread(steps.close)
            assert not torch_uvm.is_enabled()
            del steps
        with torch_uvm.disabled():  # also removes the last one
            assert torch_uvm.memory.memory_allocated() == before

    def test_one_object_can_be_entered_several_times(self) -> None:
        """Entered again while it is open, by this and another thread. Each exit closes its own scope."""
        scope = torch_uvm.enabled()
        inside, go_on = threading.Event(), threading.Event()
        seen = {}

        def other() -> None:
            with scope:
                inside.set()
                assert go_on.wait(60)
                seen["inside"] = torch_uvm.is_enabled()
            seen["after"] = torch_uvm.is_enabled()

        thread = threading.Thread(target=other)
        with scope:
            thread.start()
            assert inside.wait(60)
            with scope:
                pass
            assert torch_uvm.is_enabled()
        assert not torch_uvm.is_enabled()
        go_on.set()
        thread.join()
        assert seen == {"inside": True, "after": False}


class _Witness(torch.autograd.Function):
    """Records the thread of its backward and the switch there."""

    seen: list[tuple[int, bool, bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        made = torch.ones(4, device=DEVICE)
        _Witness.seen.append((threading.get_ident(), torch_uvm.is_enabled(), torch_uvm.is_managed(made)))
        return grads[0]


class TestBackwardThreads:
    @pytest.fixture(autouse=True)
    def forget(self) -> None:
        _Witness.seen.clear()

    def _backward(self) -> tuple[int, bool, bool]:
        x = torch.ones(4, device=DEVICE, requires_grad=True)
        loss = _Witness.apply(x).sum()  # type: ignore[no-untyped-call]
        loss.backward()
        return _Witness.seen[-1]

    def test_run_elsewhere_and_follow_the_scope(self) -> None:
        with torch_uvm.enabled():
            thread, on, managed = self._backward()
        assert thread != threading.get_ident(), "backward ran on the calling thread"
        assert on and managed

    def test_follow_a_scope_that_turns_off(self) -> None:
        torch_uvm.enable()
        with torch_uvm.disabled():
            assert self._backward()[1:] == (False, False)
        assert self._backward()[1:] == (True, True)

    def test_keep_nothing_of_a_scope_that_is_over(self) -> None:
        with torch_uvm.enabled():
            self._backward()
        assert self._backward()[1:] == (False, False)

    def test_follow_the_scope_of_backward_not_of_forward(self) -> None:
        x = torch.ones(4, device=DEVICE, requires_grad=True)
        with torch_uvm.enabled():
            loss = _Witness.apply(x).sum()  # type: ignore[no-untyped-call]
        loss.backward()
        assert _Witness.seen[-1][1:] == (False, False)
        assert x.grad is not None and not torch_uvm.is_managed(x.grad)


class TestFactories:
    """Factories of torch_uvm: always managed, otherwise equal to torch's functions of the same name."""

    @pytest.mark.parametrize("device", ["cpu", None, DEVICE, f"{DEVICE}:0", 0, torch.device(DEVICE, 0)])
    def test_devices(self, device: Any) -> None:
        with torch_uvm.disabled():
            made = torch_uvm.memory.ones(3, device=device)
        assert torch_uvm.is_managed(made)
        assert made.device == (torch.device("cpu") if device == "cpu" else torch.device(DEVICE, 0))
        assert made.tolist() == [1.0, 1.0, 1.0]

    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
    def test_shapes_and_values(self, shape: tuple[int, ...]) -> None:
        for device in ("cpu", DEVICE):
            for ours, theirs in (
                (torch_uvm.memory.zeros(shape, device=device), torch.zeros(shape)),
                (torch_uvm.memory.ones(shape, device=device), torch.ones(shape)),
                (torch_uvm.memory.full(shape, 2.5, device=device), torch.full(shape, 2.5)),
            ):
                assert torch.equal(ours.cpu(), theirs)
                assert ours.stride() == theirs.stride()
        if shape:
            assert torch_uvm.memory.empty(*shape).shape == torch_uvm.memory.empty(list(shape)).shape == shape

    @pytest.mark.parametrize("value", [True, 7, 2.5, 1 + 2j])
    def test_full_chooses_the_dtype_as_torch_does(self, value: Any) -> None:
        made = torch_uvm.memory.full((2,), value, device="cpu")
        assert made.dtype == torch.full((2,), value).dtype
        assert made.tolist() == [value, value]
        assert torch_uvm.memory.full((2,), value, dtype=torch.complex128).dtype == torch.complex128

    def test_options(self) -> None:
        made = torch_uvm.memory.zeros(2, dtype=torch.float64, requires_grad=True)
        assert made.dtype == torch.float64 and made.requires_grad and made.is_leaf
        image = torch_uvm.memory.empty(2, 3, 4, 5, memory_format=torch.channels_last)
        assert image.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize(
        "like",
        [
            torch.ones(3, 4),
            torch.ones(3, 4).t(),
            torch.ones(6, 4)[::2],
            torch.ones(1).expand(5),
            torch.ones(()),
        ],
        ids=["dense", "transposed", "sliced", "expanded", "0-dim"],
    )
    def test_empty_like_keeps_the_same_properties_as_torch(self, like: torch.Tensor) -> None:
        expected = torch.empty_like(like)
        for source in (like, like.to(DEVICE)):
            made = torch_uvm.memory.empty_like(source)
            assert torch_uvm.is_managed(made)
            assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, source.device)
        assert torch_uvm.memory.empty_like(like).stride() == expected.stride()
        other = torch_uvm.memory.empty_like(like, dtype=torch.int8, device=DEVICE)
        assert (other.dtype, other.device.type) == (torch.int8, DEVICE)

    def test_cpu_tensors_are_ordinary_to_all_code(self) -> None:
        made = torch_uvm.memory.full((4,), 3.0, device="cpu")
        made.numpy()[1] = 5.0
        assert made.tolist() == [3.0, 5.0, 3.0, 3.0]
        assert not torch_uvm.is_managed(made + 1)
