"""Budgets of several devices: each device keeps its own. Results equal those without budgets, to the last
bit."""

from __future__ import annotations

import pytest
from _spawn import Run, Spawn

PRELUDE = """
import gc, sys
import torch, torch_uvm
from torch import nn
from torch_uvm import _C

MIB = 1 << 20
torch_uvm.emulated.configure(devices=2)
FIRST, SECOND = torch.device("emu:0"), torch.device("emu:1")


class Split(nn.Module):
    # The first half on one device, the second on the other. Weights of 4 MiB are whole steps of address
    # ranges. With 2.25 MiB (768 features) an operator's 8 ranges of 4 MiB would exceed a budget of 31.5 MiB.
    def __init__(self):
        super().__init__()
        half = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)))
        self.first, self.second = half().to(FIRST), half().to(SECOND)

    def forward(self, x):
        return self.second(self.first(x.to(FIRST)).to(SECOND))


def training(steps=6, **options):
    torch.manual_seed(0)
    model = Split()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(64, 1024)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def run(program, *budgets):
    # Runs the program with these budgets of the two devices. Returns its results on the CPU, and the figures.
    gc.collect()
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.emulated.reset_counters()
    torch_uvm.enable(budget=None)
    for index, budget in enumerate(budgets):
        torch_uvm.set_budget(budget, index)
    torch_uvm.memory.reset_residency_stats()
    results = [result.detach().cpu() for result in program()]
    assert _C.check_residency() is None
    figures = torch_uvm.stats()
    figures["used"] = [torch_uvm.memory.max_memory_allocated(device) for device in (FIRST, SECOND)]
    figures["resident"] = [torch_uvm.emulated.max_resident_bytes(device) for device in (FIRST, SECOND)]
    assert figures["failures"] == 0, figures
    torch_uvm.set_budget(None)
    return results, figures


def check(program, *shares, elsewhere=0):
    # Budgets are shares of each device's use; None: no budget.
    # elsewhere: bytes with labels of both devices. They count for the first device, wherever their pages are.
    expected, plain = run(program, None, None)
    budgets = [None if share is None else int(share * used) for share, used in zip(shares, plain["used"])]
    results, figures = run(program, *budgets)
    assert len(results) == len(expected) > 0
    for number, (result, wanted) in enumerate(zip(results, expected)):
        assert torch.equal(result, wanted), number
    for index, budget in enumerate(budgets):
        if budget is not None:
            assert figures["resident"][index] <= budget + elsewhere, (index, figures)
            assert figures["peak_device_bytes"][torch.device("emu", index)] <= budget
    assert figures["written_back"]["bytes"] > 0
    return figures
"""


@pytest.fixture
def on_two(spawn: Spawn) -> Run:
    return spawn.after(PRELUDE, env={"TORCH_UVM_DEVICE": "emu"}, timeout=120)


@pytest.mark.parametrize("shares", [(0.6, 0.6), (0.5, None), (None, 0.5), (0.45, 0.8)])
def test_a_model_split_over_two(on_two: Run, shares: tuple[float | None, float | None]) -> None:
    on_two(f"check(lambda: training(foreach=False), *{shares})")


def test_with_a_foreach_optimizer(on_two: Run) -> None:
    on_two("check(lambda: training(foreach=True), 0.7, 0.7)")


def test_updates_together_fit_the_budget_of_their_device(on_two: Run) -> None:
    on_two(
        """
        torch_uvm.enable(budget=256 * MIB, optimizer="deferred")
        torch_uvm.set_budget(12 * MIB, SECOND)
        parameters = [nn.Parameter(torch.randn(256, 1024).to(each)) for each in [FIRST] * 2 + [SECOND] * 6]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        optimizer.step()
        assert _C.pending_updates() == 1 + 6
        """
    )


def test_repeated_steps_match_the_schedule(on_two: Run) -> None:
    on_two(
        """
        figures = check(lambda: training(steps=14, foreach=False), 0.6, 0.6)
        assert figures["plan_hits"] > figures["plan_misses"], figures
        """
    )


def test_a_budget_of_one_leaves_the_other_alone(on_two: Run) -> None:
    on_two(
        """
        def program():
            ours = [torch.full((MIB // 4,), float(i), device=FIRST) for i in range(12)]
            others = [torch.full((MIB // 4,), float(i), device=SECOND) for i in range(12)]
            addresses = [each.data_ptr() for each in others]
            for _ in range(3):
                for one, other in zip(ours, others):
                    one += 1
                    other += 2
            assert [each.data_ptr() for each in others] == addresses
            assert all(torch_uvm.residency(each) == {SECOND: MIB} for each in others)
            return ours + others

        check(program, 0.5, None)
        """
    )


def test_copies_between_them(on_two: Run) -> None:
    on_two(
        """
        def program():
            ours = [torch.full((MIB // 4,), float(i), device=FIRST) for i in range(12)]
            for turn in range(4):
                there = [each.to(SECOND) for each in ours]
                for each in there:
                    each += 1
                for each, other in zip(ours, there):
                    each.copy_(other)
                ours[turn] = there[turn].to(FIRST)
            return ours + there

        check(program, 0.5, 0.5)
        """
    )


def test_labels_of_both(on_two: Run) -> None:
    """Bytes with labels of two devices are pinned. They can be evicted after one label is gone."""
    on_two(
        """
        def program():
            table = torch.arange(float(MIB // 4), device=FIRST)
            other = torch_uvm.to(table, SECOND)
            both = [device for _ in range(10) for device in (FIRST, SECOND)]
            rest = [torch.full((MIB // 4,), float(i), device=device) for i, device in enumerate(both)]
            results = []
            for turn in range(4):
                for each in rest:
                    each += 1
                other *= 2
                torch_uvm.to(table, FIRST)  # orders the two devices' streams
                results.append(table.sum())
                assert table.data_ptr() == other.data_ptr()
                table = torch_uvm.to(other, FIRST)
            del table
            torch.accelerator.synchronize()
            for _ in range(4):
                for each in rest:
                    each += 1
            results.append(other.sum())
            back = torch_uvm.to(other, FIRST)
            results.append(back.sum())
            assert back.data_ptr() == other.data_ptr()
            return [*results, *rest, back]

        check(program, 0.6, 0.6, elsewhere=MIB)
        """
    )


def test_four_threads_on_two_devices(on_two: Run) -> None:
    on_two(
        """
        import threading

        def program():
            results = [None] * 4

            def work(number):
                device = (FIRST, SECOND)[number % 2]
                values = [torch.full((MIB // 4,), float(i), device=device) for i in range(6)]
                for _ in range(10):
                    for one, other in zip(values, values[1:]):
                        one += other
                results[number] = torch.stack([value.cpu() for value in values])

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results

        expected, _ = run(program, None, None)
        results, figures = run(program, 8 * MIB, 9 * MIB)
        assert all(map(torch.equal, results, expected))
        assert figures["written_back"]["bytes"] > 0
        """
    )


def test_the_default_waits_for_a_request_that_is_taken_back(on_two: Run) -> None:
    """A request for all devices succeeds on the first and fails on the second. It must not take effect."""
    on_two("""
import threading

_C.set_enabled(True)
tensors = [torch.ones(8 * MIB // 4, device=device) for device in (FIRST, SECOND)]
_C.request_budget(0, "16MiB")
for _ in range(2):  # leaves a segment that is larger than the budget, and is used again
    tensors[0].add_(1)
torch.accelerator.synchronize(0)
raised = []

def request():
    try:
        _C.request_budget(None, "4MiB")
    except RuntimeError as error:
        raised.append(error)

_C.emu_fail_call("create_stream", 1)  # on the second device; the first one has its stream
_C.emu_hold_device(0)
requesting = threading.Thread(target=request)
requesting.start()
_C.emu_await_waiter()
begun = threading.Event()
default = threading.Thread(target=lambda: (begun.set(), _C.request_default_budget()))
default.start()
begun.wait()
_C.emu_release_device(0)
requesting.join()
default.join()
assert "create_stream was made to fail" in str(raised), raised
assert [_C.requested_budget(index) for index in (0, 1)] == ["16MiB", "auto"]
""")


def test_a_budget_that_cannot_be_lifted_leaves_the_others(on_two: Run) -> None:
    """The limit has room for what the first device has on the host, and not for the second one's."""
    on_two(
        """
        torch_uvm.enable(budget="16MiB")
        first = [torch.ones(MIB, device=FIRST) for _ in range(6)]
        second = [torch.ones(MIB, device=SECOND) for _ in range(24)]
        torch_uvm.set_limit("64MiB")
        try:
            torch_uvm.set_budget(None)
            raise SystemExit("it was lifted")
        except torch.OutOfMemoryError as error:
            assert "bring back" in str(error), error
        assert [torch_uvm.get_budget(device) for device in (FIRST, SECOND)] == [16 * MIB, 16 * MIB]
        for _ in range(2):
            for each in [*first, *second]:
                each.add_(1)
        assert all(torch_uvm.memory.memory_reserved(device) <= 16 * MIB for device in (FIRST, SECOND))
        torch_uvm.set_limit(None)
        torch_uvm.set_budget(None)
        assert [torch_uvm.get_budget(device) for device in (FIRST, SECOND)] == [None, None]
        assert all((each == 3).all().item() for each in [*first, *second])
        """
    )


def test_a_pin_through_another_devices_label(on_two: Run) -> None:
    """One record of the bytes serves all their labels."""
    on_two(
        """
        def press():
            others = [torch.zeros(MIB, device=device) for device in (FIRST, SECOND) for _ in range(4)]
            for _ in range(3):
                for other in others:
                    other.add_(1)

        torch_uvm.enable(budget="12MiB")
        press()  # both devices have a budget from their first managed memory on
        x = torch.ones(MIB, device=FIRST)
        x.add_(1)  # the engine knows it
        y = torch_uvm.to(x, SECOND)
        kept = [torch_uvm.keep_resident(y), torch_uvm.keep_resident(x)]
        assert _C.check_residency() is None
        address = y.data_ptr()
        del x
        gc.collect()
        press()
        assert y.data_ptr() == address and _C.check_residency() is None
        for each in kept:
            each.release()
        del each, kept
        press()
        assert y.sum().item() == 2 * MIB and _C.check_residency() is None
        del y
        press()
        """
    )


def test_an_allocator_of_one_device_leaves_the_others(on_two: Run) -> None:
    on_two(
        """
        from torch_uvm.allocators import Allocator, use_allocator
        torch_uvm.enable()
        pool = Allocator.pool("8MiB", upstream=torch_uvm.allocators.arena("8MiB", device=FIRST))
        with use_allocator(pool):
            first, second = torch.ones(MIB, device=FIRST), torch.ones(MIB, device=SECOND)
        assert first.sum().item() == second.sum().item() == MIB
        """
    )
