"""Every call of the runtime fails once, wherever one is made: the documented error or none, no byte lost."""
# ruff: noqa: B023  (each lambda is called at once)

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _faults import LONG, Attempts, check_error, each_call_fails, emu
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
BUDGET = 8 * MIB
_names = (f"faults {number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    _C.emu_clear_failures()  # of a test that has failed
    torch_uvm.enable(budget=None, optimizer="in_place")
    torch_uvm.disable()
    torch_uvm.empty_cache()


def filled(count: int, value: float, device: str = "emu") -> torch.Tensor:
    return torch.full((count,), value, device=device)


def is_all(x: torch.Tensor, value: float) -> bool:
    """Not by an operator that may fail half-way: by the bytes, from the host."""
    return bool((x.cpu() == value).all())


# --- allocation -----------------------------------------------------------------------------------


def _allocations(attempt: Attempts) -> None:
    one, two = emu.current_stream(), attempt(emu.Stream)
    kept: list[tuple[torch.Tensor, float]] = []
    for number, count in enumerate((10, 1000, 300_000, 3_000_000, 700_000)):
        made = attempt(lambda: filled(count, float(number)))
        if made is None:
            continue
        kept.append((made, float(number)))
        if two is not None:
            attempt(lambda: made.record_stream(two))
            with emu.stream(two):
                copied = attempt(lambda: made.clone())
                if copied is not None:
                    attempt(lambda: copied.record_stream(one))
                del copied
        if number == 2:
            del kept[0]
            attempt(torch_uvm.empty_cache)
    attempt(torch.accelerator.synchronize)
    for made, value in kept:
        right = attempt(lambda: is_all(made, value), otherwise=True)
        assert right
    host = attempt(lambda: torch_uvm.full((100_000,), 3.0, device="cpu"))
    assert host is None or (host == 3.0).all()


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "plain"])
def test_allocation(managed: bool) -> None:
    if managed:
        torch_uvm.enable(budget=None)
    assert each_call_fails(_allocations, every=2) > 10


def test_pinned_memory_is_refused_as_memory() -> None:
    def pin(attempt: Attempts) -> None:
        x = torch.arange(1000.0)
        pinned = attempt(x.pin_memory)
        assert pinned is None or torch.equal(pinned, x)

    assert each_call_fails(pin, "allocate_pinned") == 1


# --- moves and copies -----------------------------------------------------------------------------


def _moves(attempt: Attempts) -> None:
    x = torch.arange(300_000.0)
    ours = attempt(lambda: torch_uvm.to(x, "emu", managed=True))
    if ours is None:
        return
    other = emu.Stream() if attempt.error is None else None
    address = ours.data_ptr()
    for round_, non_blocking in enumerate((False, True)):
        moved = attempt(lambda: torch_uvm.to(ours, "cpu", non_blocking=non_blocking))
        attempt(emu.synchronize)
        for label in (ours, moved):
            if label is not None:
                assert label.data_ptr() == address
                assert attempt(lambda: torch.equal(label.cpu(), x + round_), otherwise=True)
        if moved is not None:
            back = attempt(lambda: torch_uvm.to(moved, "emu", non_blocking=non_blocking))
            assert back is None or back.data_ptr() == address
        if other is not None:
            attempt(lambda: ours.record_stream(other))
        earlier = attempt.error
        attempt(lambda: ours.add_(1.0))
        found = attempt(ours.cpu)
        if attempt.error is earlier:
            assert torch.equal(found, x + round_ + 1)
        elif found is not None:  # done or not, and nothing in between
            assert torch.equal(found, x + round_ + 1) or torch.equal(found, x + round_)
            return


def _copies(attempt: Attempts) -> None:
    x = torch.arange(100_000.0)
    pinned = attempt(x.pin_memory)
    sources = [x] if pinned is None else [x, pinned]
    for source, non_blocking in itertools.product(sources, (False, True)):
        there = attempt(lambda: source.to("emu", non_blocking=non_blocking))
        if there is None:
            continue
        assert attempt(lambda: there[1].item() == 1.0, otherwise=True)
        back = attempt(lambda: there.to("cpu", non_blocking=non_blocking))
        attempt(emu.synchronize)
        assert back is None or torch.equal(back, x)
        into = torch.empty(0) if pinned is None else pinned.clone()
        if pinned is not None:
            done = attempt(lambda: into.copy_(there, non_blocking=True))
            attempt(emu.synchronize)
            assert done is None or torch.equal(into, x)
        halves = attempt(lambda: there.half().float())  # converted on the way
        assert halves is None or attempt(lambda: torch.equal(halves.cpu(), x.half().float()), otherwise=True)
        strided = attempt(lambda: there.view(1000, 100).t().cpu())
        assert strided is None or torch.equal(strided, x.view(1000, 100).t())


def test_moves() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_moves) > 10


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "plain"])
def test_copies(managed: bool) -> None:
    if managed:
        torch_uvm.enable(budget=None)
    assert each_call_fails(_copies) > 20


# --- hints ----------------------------------------------------------------------------------------


def _hints(attempt: Attempts) -> None:
    x = attempt(lambda: filled(1 << 20, 3.0))
    if x is None:
        return
    attempt(lambda: torch_uvm.prefetch(x, "cpu"))
    attempt(lambda: torch_uvm.prefetch([x, {"again": x[100_000:]}]))
    attempt(lambda: torch_uvm.advise(x, read_mostly=True, preferred_location="emu", accessed_by=["cpu"]))
    assert attempt(lambda: is_all(x, 3.0), otherwise=True)
    attempt(lambda: torch_uvm.advise(x, read_mostly=False, preferred_location=None, accessed_by=[]))
    scratch = attempt(lambda: filled(1 << 20, 4.0))
    if scratch is not None:
        attempt(lambda: torch_uvm.discard(scratch))
        on_host = attempt(lambda: torch_uvm.to(scratch, "cpu"))
        if on_host is not None:
            attempt(lambda: torch_uvm.discard(on_host))  # waits
    assert attempt(lambda: is_all(x, 3.0), otherwise=True)


def test_hints() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_hints) > 10


@pytest.mark.parametrize("name", ["record_event", "synchronize_event"])
def test_a_discard_that_fails_leaves_no_event(name: str) -> None:
    torch_uvm.enable(budget=None)
    on_host = torch_uvm.to(filled(1 << 20, 4.0), "cpu")  # whose discard waits
    before = _C.emu_live_objects()
    _C.emu_fail_call(name, 1)
    with pytest.raises(RuntimeError, match=name):
        torch_uvm.discard(on_host)
    assert _C.emu_live_objects() == before
    torch_uvm.discard(on_host)


# --- under a budget -------------------------------------------------------------------------------


class Known:
    """Tensors beyond the budget, and what each is to hold. One that raised has written, or has not."""

    def __init__(self, attempt: Attempts, count: int) -> None:
        self.attempt = attempt
        made = [attempt(lambda: filled(MIB // 4, float(i))) for i in range(count)]
        self.tensors = [x for x in made if x is not None]
        self.values = [float(i) for i, x in enumerate(made) if x is not None]

    def add(self, index: int) -> None:
        x = self.tensors[index]
        failures = self.attempt.error
        self.attempt(lambda: x.add_(1.0))
        if self.attempt.error is failures:
            self.values[index] += 1.0
        else:
            now = float(x.cpu()[0])  # no call fails any more: one has
            assert now in (self.values[index], self.values[index] + 1.0)
            self.values[index] = now

    def check(self, index: int) -> None:
        x, value = self.tensors[index], self.values[index]
        assert self.attempt(lambda: is_all(x, value), otherwise=True), (index, value)


def _engine(attempt: Attempts) -> None:
    known = Known(attempt, 12)  # of 1 MiB
    count = len(known.tensors)
    for step in range(3):
        for index in range(count):
            known.add(index)
            sums = attempt(lambda: known.tensors[index] + known.tensors[(index + 1) % count])
            wanted = known.values[index] + known.values[(index + 1) % count]
            if sums is not None and index % 4 == step:
                assert attempt(lambda: is_all(sums, wanted), otherwise=True)
            sums = None
    if count > 3:
        kept = attempt(lambda: torch_uvm.keep_resident(known.tensors[0]))
        attempt(known.tensors[1].data_ptr)
        attempt(lambda: known.tensors[2].untyped_storage().data_ptr())
        known.add(1)
        if kept is not None:
            kept.release()
    attempt(lambda: torch_uvm.set_budget(BUDGET // 2))
    for index in range(count):
        known.check(index)
    attempt(lambda: torch_uvm.set_budget(None))
    for index in range(count):
        known.check(index)
    for _ in range(2):  # a second time it goes well
        attempt(lambda: torch_uvm.set_budget(BUDGET))


def test_the_engine() -> None:
    torch_uvm.enable(budget=BUDGET)
    assert each_call_fails(_engine, every=97, first=3) > 5


@pytest.mark.parametrize("name", ["copy_async", "record_event", "wait_event"])
def test_each_call_of_the_engines_copies(name: str) -> None:
    torch_uvm.enable(budget=BUDGET)
    assert each_call_fails(_engine, name, every=41, first=5) > 0


def test_what_could_not_all_be_kept_is_not_kept() -> None:
    torch_uvm.enable(budget=BUDGET)
    xs = [filled(MIB // 2, float(i)) for i in range(3)]  # of 2 MiB
    others = [filled(13 * MIB // 8, 1.0) for _ in range(2)]  # of 6.5 MiB: no room for any of xs beside one
    on_device = {torch.device("emu:0"): xs[0].nbytes}

    def leave() -> bool:
        """Whether all of them do, for what else is used."""
        for _ in range(20):
            for other in others:
                other.add_(1.0)
            if all(torch_uvm.residency(x) != on_device for x in xs):
                return True
        return False

    failed = 0
    for nth in itertools.count(1):
        assert leave(), f"after call {nth - 1}"
        _C.emu_fail_call("*", nth)
        try:
            torch_uvm.keep_resident(xs).release()
        except torch.OutOfMemoryError as error:
            if "no room to keep" not in str(error):  # what made way could not
                check_error(error)
            failed += 1
        except RuntimeError as error:
            check_error(error)
            failed += 1
        if _C.emu_clear_failures() != 0:
            break
    assert failed > 1
    assert all(is_all(x, float(i)) for i, x in enumerate(xs))


# --- training -------------------------------------------------------------------------------------

STEPS = 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[part for _ in range(5) for part in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10)
    )


_inputs = [torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(STEPS)]
Make = Callable[[Any], torch.optim.Optimizer]


class Trained:
    def __init__(self, model: nn.Module, make: Make, device: str) -> None:
        self.model = copy.deepcopy(model).to(device)
        self.optimizer = make(self.model.parameters())
        self.device = device

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = self.model(_inputs[number].to(self.device)).square().mean()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """On the CPU."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(
            torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), state)
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def same(one: Any, other: Any) -> bool:
    ours, theirs = (torch.utils._pytree.tree_leaves(state) for state in (one, other))
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(ours, theirs, strict=True)
    )


def _training(make: Make) -> Callable[[Attempts], None]:
    """Steps; one that raised is taken again from what was there before it, as scripts with checkpoints do."""
    model = _model()
    torch_uvm.disable()
    reference = Trained(model, make, "cpu")
    wanted = []
    for number in range(STEPS):
        reference.step(number)
        wanted.append(reference.state())

    def train(attempt: Attempts) -> None:
        ours: Any = None
        while ours is None:  # a second time it goes well
            ours = attempt(lambda: Trained(model, make, "emu"))
        state = None
        for number in range(STEPS):
            before = attempt.error
            attempt(lambda: ours.step(number))
            after = attempt(ours.state)
            if attempt.error is not before:
                if state is None:
                    ours = Trained(model, make, "emu")
                else:
                    ours.load(state)
                ours.step(number)
                after = ours.state()
            assert same(after, wanted[number]), f"step {number} after {attempt.error!r}"
            state = after

    return train


OPTIMIZERS: dict[str, Make] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize(
    ("optimizer", "deferred"),
    [(name, deferred) for name in OPTIMIZERS for deferred in (False, True)]
    if LONG
    else [("foreach", False), ("loop", False), ("fused", True)],
)
def test_training(optimizer: str, deferred: bool) -> None:
    train = _training(OPTIMIZERS[optimizer])
    torch_uvm.enable(budget=BUDGET, optimizer="deferred" if deferred else "in_place")
    assert each_call_fails(train, every=499, first=7) > 1


# --- allocators, host tensors ---------------------------------------------------------------------


def _in_scope(scope: Any) -> Callable[[Attempts], None]:
    layer = nn.Linear(64, 64)
    wanted = layer(torch.ones(8, 64)).sum().item()

    def iterate(attempt: Attempts) -> None:
        for _ in range(3):
            entered = attempt(lambda: scope.__enter__() or True)
            if entered is None:
                continue
            try:
                ours = attempt(lambda: copy.deepcopy(layer).to("emu"))
                if ours is not None:
                    found = attempt(lambda: ours(torch.ones(8, 64, device="emu")).sum().item())
                    assert found is None or found == pytest.approx(wanted, rel=1e-5)
                large = attempt(lambda: filled(1 << 20, 5.0))
                assert large is None or attempt(lambda: is_all(large, 5.0), otherwise=True)
                ours = large = None
            finally:
                attempt(lambda: scope.__exit__(None, None, None))
        attempt(scope.release if hasattr(scope, "release") else (lambda: None))

    return iterate


def test_an_arena() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_in_scope(torch_uvm.arena("1MiB")), every=2) > 5


def test_a_plan() -> None:
    torch_uvm.enable(budget=None)
    assert each_call_fails(_in_scope(torch_uvm.allocation_plan(next(_names))), every=3) > 5


def _host_tensors(attempt: Attempts) -> None:
    x = attempt(lambda: torch.full((1 << 20,), 3.0))
    if x is None:
        return
    there = attempt(lambda: torch_uvm.to(x, "emu"))
    for label in (x, there):
        assert label is None or attempt(lambda: is_all(label, 3.0), otherwise=True)


@pytest.mark.filterwarnings("ignore:torch_uvm. a CPU tensor gets ordinary memory")
def test_host_tensors() -> None:
    torch_uvm.enable(budget=None, host_tensors=True)
    assert each_call_fails(_host_tensors) > 3


# --- two devices ----------------------------------------------------------------------------------

TWO = """
    import torch, torch_uvm
    from _faults import Attempts, each_call_fails, emu

    def between(attempt):
        x = attempt(lambda: torch.arange(300_000.0).to("emu:0"))
        if x is None:
            return
        there = attempt(lambda: x.to("emu:1"))
        if there is not None:
            assert attempt(lambda: torch.equal(there.cpu(), torch.arange(300_000.0)), otherwise=True)
            earlier = attempt.error
            attempt(lambda: there.copy_(x.add(1.0)))
            found = attempt(there.cpu)
            attempt(lambda: torch.accelerator.synchronize(1))
            done, before = torch.arange(300_000.0) + 1, torch.arange(300_000.0)
            if attempt.error is earlier:
                assert torch.equal(found, done)
            else:
                assert found is None or torch.equal(found, done) or torch.equal(found, before)
        moved = attempt(lambda: torch_uvm.to(x, "emu:1"))
        if moved is not None:
            assert moved.data_ptr() == x.data_ptr()
            assert attempt(lambda: torch.equal(moved.cpu(), torch.arange(300_000.0)), otherwise=True)

    torch_uvm.enable(budget=None)
    assert each_call_fails(between) > 10
"""


@pytest.mark.parametrize("seed", range(8) if LONG else [3])
def test_between_two_devices(spawn: Spawn, seed: int) -> None:
    """Under delayed work, where what is not waited for is not there yet."""
    env = {
        "TORCH_UVM_CONF": f"emulated_devices:2,emulated_schedule_seed:{seed}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    spawn(TWO, env=env)
