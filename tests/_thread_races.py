"""Programs of several threads under a changing budget. They run in `_races.py` and under sanitizers."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable

import torch
from _race_registry import MIB, RIGHT, at_once, compare, full, race

import torch_uvm

SIZES = [MIB // 16 * n for n in (1, 2, 3, 4, 8, 12, 16)]  # floats: 256 KiB to 4 MiB
OPERATIONS = 500  # per thread: some seconds in all
ROUNDS = 10  # maximum


#: Released periodically by a worker: a budget that changes continuously would starve the workers.
TURNS = threading.Semaphore(0)
OPERATIONS_IN_A_TURN = 20
CHANGES: list[str] = []  # of budgets, with timestamps


def budgets(*requests: str | None) -> Callable[[], None]:
    """A function that waits for its turn and sets the next of these budgets."""
    following = itertools.cycle(requests)

    def change() -> None:
        if not TURNS.acquire(timeout=1):
            return  # the workers may have ended
        request = next(following)
        CHANGES.append(f"{request}@{time.perf_counter():.4f}")
        try:
            torch_uvm.set_budget(request)
            CHANGES.append(f"done@{time.perf_counter():.4f}")
        except torch.OutOfMemoryError:
            pass  # no room to fetch all tensors: the budget stays

    return change


def come_and_go(rng: random.Random, most: int, sizes: list[int], operations: int = OPERATIONS) -> str:
    """Makes, uses, clones and frees tensors, at most `most` at a time. All elements of a tensor are equal."""
    kept: list[tuple[torch.Tensor, float]] = []
    for operation in range(operations):
        if operation % OPERATIONS_IN_A_TURN == 0:
            TURNS.release()
        action = rng.random()
        try:
            if len(kept) < 2 or action < 0.35:
                value = float(rng.randrange(1000))
                kept.append((torch.full((rng.choice(sizes),), value, device="emu"), value))
            elif action < 0.5:
                tensor, value = kept.pop(rng.randrange(len(kept)))
                kept.append((tensor.add_(1), value + 1))
            elif action < 0.7:
                tensor, value = rng.choice(kept)
                kept.append((tensor.clone(), value))
            elif action < 0.75:
                tensor, value = rng.choice(kept)
                seen = tensor.cpu()
                if not seen.eq(value).all():
                    return f"a tensor of {tensor.nbytes} bytes: {seen.unique()[:4].tolist()}, not {value}"
            else:
                kept.pop(rng.randrange(len(kept)))
            while len(kept) > most:
                kept.pop(rng.randrange(len(kept)))
        except torch.OutOfMemoryError:
            kept.clear()  # the other threads' operands leave too little room
    return RIGHT


def churn(rng: random.Random, most: int, operations: int) -> str:
    """Makes and frees small tensors. Faster than `come_and_go`, because it does not check values."""
    kept: list[torch.Tensor] = []
    for _ in range(operations):
        try:
            kept.append(torch.empty(rng.choice(SIZES[:2]), device="emu"))
        except torch.OutOfMemoryError:
            kept.clear()
        while len(kept) > rng.randrange(1, most):
            kept.pop(rng.randrange(len(kept)))
    return RIGHT


@race(seeds=2, memory="64MiB", threads=True)
def comes_and_goes_beside_set_budget(draw: random.Random) -> str:
    torch_uvm.set_budget("16MiB")
    workers = [
        functools.partial(come_and_go, random.Random(draw.random()), most=8, sizes=SIZES) for _ in range(4)
    ]
    return at_once(workers, budgets(None, "12MiB"))


@race(seeds=2, memory="64MiB", threads=True)
def frees_beside_moving_aside(draw: random.Random) -> str:
    """Large requests relocate small tensors while other threads free them."""
    torch_uvm.set_budget("16MiB")
    for _ in range(ROUNDS):
        rngs = [random.Random(draw.random()) for _ in range(4)]
        workers = [functools.partial(churn, rng, most=12, operations=20 * OPERATIONS) for rng in rngs[:2]]
        workers.append(
            functools.partial(come_and_go, rngs[2], most=6, sizes=SIZES[:4], operations=2 * OPERATIONS)
        )
        large = functools.partial(
            come_and_go, rngs[3], most=1, sizes=[5 * MIB // 4], operations=2 * OPERATIONS
        )
        wrong = at_once([*workers, large])
        # Whether the threads meet depends on the machine: under load, one round in twenty moved nothing.
        if wrong or torch_uvm.stats()["moved"]["count"]:
            return wrong
    return f"nothing was moved aside in {ROUNDS} rounds: the program tests nothing"


@race(seeds=2, memory="64MiB", threads=True)
def residency_beside_evictions(draw: random.Random) -> str:
    """A thread asks where tensors are, while the operators of another one evict them."""
    torch_uvm.set_budget("8MiB")
    tensors = [full(number) for number in range(16)]
    ended = threading.Event()

    def use() -> str:
        try:
            for _ in range(OPERATIONS):
                draw.choice(tensors).add_(0)
        finally:
            ended.set()
        return RIGHT

    def ask() -> str:
        while not ended.is_set():
            for tensor in tensors:
                places = [torch_uvm.residency(tensor), torch_uvm.emulated.residency(tensor)]
                if [sum(it.values()) for it in places] != [MIB, MIB]:
                    return f"a tensor of 1 MiB has its bytes in {places}"
        return RIGHT

    return at_once([use, ask]) or compare(tensors, range(16), "tensor")


class Both:
    """A tensor of the accelerator and its expected value on the CPU."""

    def __init__(self, ours: torch.Tensor, cpu: torch.Tensor) -> None:
        self.ours = ours
        self.cpu = cpu
        self.past: list[str] = []

    def check(self, what: str) -> None:
        seen = self.ours.detach().cpu()
        if not torch.equal(seen, self.cpu):
            differ = (seen != self.cpu).nonzero().flatten()
            first = int(differ[0])
            raise AssertionError(
                f"{what}: {len(differ)} of {len(seen)} elements differ, from {first} to {int(differ[-1])}; "
                f"the first is {float(seen[first])}, not {float(self.cpu[first])}; "
                f"its past: {' '.join(self.past)}; budgets: {' '.join(CHANGES[-20:])}"
            )


class RandomProgram:
    """Random operations on a few tensors, each on the accelerator and on the CPU."""

    MOST = 8
    name = ""  # of the current action

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kept: list[Both] = []
        self.side = torch.Stream("emu")

    def run(self, operations: int) -> str:
        actions = [
            self.make,
            self.in_place,
            self.out_of_place,
            self.view,
            self.clone,
            self.backward,
            self.as_numpy,
            self.as_dlpack,
            self.pinned,
            self.other_label,
            self.other_stream,
            self.drop,
        ]
        done = 0
        for operation in range(operations):
            if operation % OPERATIONS_IN_A_TURN == 0:
                TURNS.release()
            action = self.rng.choice(actions) if len(self.kept) > 1 else self.make
            self.name = action.__name__
            try:
                action()
                done += 1
            except torch.OutOfMemoryError:
                self.kept.clear()
            while len(self.kept) > self.MOST:
                self.drop()
        while self.kept:
            self.drop()
        return RIGHT if done > operations // 2 else f"only {done} of {operations} operations had memory"

    def one(self) -> Both:
        it = self.rng.choice(self.kept)
        it.past.append(f"{self.name}@{time.perf_counter():.4f}")
        return it

    def make(self) -> None:
        size = self.rng.choice(SIZES)
        cpu = torch.arange(size, dtype=torch.float32).remainder_(self.rng.randrange(2, 99))
        self.kept.append(Both(cpu.to("emu"), cpu))

    def in_place(self) -> None:
        it, number = self.one(), float(self.rng.randrange(9))
        for tensor in (it.ours, it.cpu):  # the accelerator first: it may raise out of memory
            tensor.mul_(-1).add_(number)

    def out_of_place(self) -> None:
        it = self.one()
        ours, cpu = ((tensor * tensor + 3).remainder(1009) for tensor in (it.ours, it.cpu))
        self.kept.append(Both(ours, cpu))

    def view(self) -> None:
        it = self.one()
        if len(it.cpu) >= 2:
            part = slice(len(it.cpu) // 2) if self.rng.random() < 0.5 else slice(len(it.cpu) // 2, None)
            self.kept.append(Both(it.ours[part], it.cpu[part]))
            self.kept[-1].past = it.past

    def clone(self) -> None:
        it = self.one()
        self.kept.append(Both(it.ours.clone(), it.cpu.clone()))

    def backward(self) -> None:
        it = self.one()
        gradients = []
        for tensor in (it.ours, it.cpu):
            leaf = tensor.clone().requires_grad_()
            (leaf * leaf).sin().sum().backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad)
        self.kept.append(Both(*gradients))

    def as_numpy(self) -> None:
        it = self.one()
        array = torch_uvm.to(it.ours, "cpu").numpy()
        torch.accelerator.synchronize()
        array += 1
        it.cpu.add_(1)

    def as_dlpack(self) -> None:
        it = self.one()
        torch_uvm.memory.from_dlpack(it.ours).add_(1)
        it.cpu.add_(1)

    def pinned(self) -> None:
        it = self.one()
        with torch_uvm.resident(it.ours):
            it.ours.add_(1)
            it.cpu.add_(1)
        if self.rng.random() < 0.5:
            kept = torch_uvm.keep_resident(it.ours)
            self.out_of_place()
            kept.release()

    def other_label(self) -> None:
        it = self.one()
        torch_uvm.to(it.ours, "cpu").add_(2)
        it.cpu.add_(2)

    def other_stream(self) -> None:
        it = self.one()
        out = torch.zeros(len(it.cpu)).pin_memory()
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            out.copy_(it.ours, non_blocking=True)
        it.ours.record_stream(self.side)
        self.side.synchronize()
        Both(out, it.cpu).check("copied on another stream")

    def drop(self) -> None:
        it = self.kept.pop(self.rng.randrange(len(self.kept)))
        if self.rng.random() < 0.5:
            it.check("a tensor that is dropped")


@race(seeds=3, memory="64MiB", threads=True)
def random_programs_beside_set_budget(draw: random.Random) -> str:
    torch_uvm.set_budget("16MiB")
    programs = [RandomProgram(random.Random(draw.random())) for _ in range(3)]
    requests = [draw.choice(["12MiB", "16MiB", "24MiB", "auto", None]) for _ in range(8)]
    return at_once(
        [functools.partial(program.run, OPERATIONS // 2) for program in programs], budgets(*requests, None)
    )
