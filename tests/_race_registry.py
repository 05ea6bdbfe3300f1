"""The registry of the programs of `_races.py` and `_thread_races.py`, and their common helpers."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

import torch_uvm

MIB = 1 << 20
FLOATS = MIB // 4  # a tensor of 1 MiB: four times the smallest storage that the engine moves
RIGHT = ""

Program = Callable[[random.Random], str]


class Race(NamedTuple):
    program: Program
    """Returns the error that it observed, or RIGHT."""
    devices: int
    wrong: bool
    """The program lacks a synchronisation: some schedule must show the error."""
    seeds: int
    """The number of seeds by default."""
    memory: str | None
    """Memory of each device; None: the emulator's default."""
    threads: bool
    """Its threads race with each other, so it also runs in builds under a sanitizer (`_sanitized.py`)."""


RACES: dict[str, Race] = {}


def race(
    devices: int = 1,
    wrong: bool = False,
    seeds: int = 16,
    memory: str | None = None,
    threads: bool = False,
) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        RACES[program.__name__] = Race(program, devices, wrong, seeds, memory, threads)
        return program

    return add


def full(value: float, device: str = "emu") -> torch.Tensor:
    return torch.full((FLOATS,), float(value), device=device)


def compare(tensors: Iterable[torch.Tensor], expected: Iterable[float], what: str) -> str:
    for number, (tensor, value) in enumerate(zip(tensors, expected, strict=True)):
        seen = tensor.cpu()
        if not seen.eq(value).all():
            return f"{what} {number}: {seen.unique().tolist()[:4]} instead of {value}"
    return RIGHT


class Pressure:
    """Tensors that exceed the budget: using one evicts others."""

    def __init__(self, tensors: int = 8, budget: int = 6, device: int = 0) -> None:
        torch_uvm.set_budget(budget * MIB, device)
        self.tensors = [full(i, f"emu:{device}") for i in range(tensors)]
        self.expected = [float(i) for i in range(tensors)]

    def use(self, number: int) -> None:
        self.tensors[number].add_(1)
        self.expected[number] += 1

    def use_all(self) -> None:
        for number in range(len(self.tensors)):
            self.use(number)

    def check(self) -> str:
        return compare(self.tensors, self.expected, "under pressure")


def at_once(workers: Iterable[Callable[[], str]], beside: Callable[[], None] | None = None) -> str:
    """Runs each worker on its own thread. Calls `beside` repeatedly on this thread until all workers end.

    Returns the first error that a worker reports, or its traceback; else RIGHT.
    """
    wrong: list[str] = []

    def run(worker: Callable[[], str]) -> None:
        try:
            seen = worker()
        except BaseException:
            seen = traceback.format_exc()
        if seen != RIGHT:
            wrong.append(seen)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    while beside is not None and any(thread.is_alive() for thread in threads):
        beside()
    for thread in threads:
        thread.join()
    return wrong[0] if wrong else RIGHT
