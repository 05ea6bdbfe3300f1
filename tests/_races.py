"""Programs that race evictions and fetches under a budget with delayed work. They check every byte.

    python tests/_races.py [--seeds FIRST:LAST] [--seconds S] [--jobs N] [NAME ...]

runs each program in its own process per seed, N processes at a time. Fails if a program saw a wrong value. A
program without the required synchronisation must fail for at least one seed, which shows that the schedules
reach the race. The seed is that of the emulated accelerator: equal seeds give equal orders of copies.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import itertools
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import _hook_races  # noqa: F401 its programs are in the table, too
import _thread_races  # noqa: F401
import torch
from _race_registry import FLOATS, MIB, RACES, RIGHT, Pressure, at_once, compare, full, race
from torch import nn

import torch_uvm
from torch_uvm import _C, emulated


@race()
def writes_while_it_is_written_back(draw: random.Random) -> str:
    """Steps repeat, so that evicted storages are written back ahead of time. Unscheduled writes follow."""
    pressure = Pressure()
    for _ in range(5):
        pressure.use_all()
        if draw.random() < 0.5:
            pressure.use(draw.randrange(8))
    for _ in range(24):
        pressure.use(draw.randrange(8))
    return pressure.check()


@race()
def writes_through_another_label(draw: random.Random) -> str:
    """Writes a tensor under its CPU label and through a view on the device, while others are evicted."""
    pressure = Pressure()
    for turn in range(10):
        number = draw.randrange(8)
        on_cpu = torch_uvm.to(pressure.tensors[number], "cpu")
        on_cpu.add_(2)
        pressure.expected[number] += 2
        pressure.use(draw.randrange(8))
        pressure.tensors[number][: FLOATS // 2].add_(1)
        pressure.tensors[number][FLOATS // 2 :].add_(1)
        pressure.expected[number] += 1
        if turn % 2 == 0:
            pressure.use_all()
        torch.accelerator.synchronize()
        if not on_cpu.eq(pressure.expected[number]).all():
            return f"the CPU's label: {on_cpu.unique().tolist()[:4]} instead of {pressure.expected[number]}"
    return pressure.check()


@race()
def reads_an_address(draw: random.Random) -> str:
    """The bytes at an escaped address are complete and stay there until the next operator."""
    pressure = Pressure()
    seen = torch.empty(FLOATS)
    for _ in range(12):
        number = draw.randrange(8)
        pressure.use(draw.randrange(8))
        address = pressure.tensors[number].data_ptr()
        torch.accelerator.synchronize()
        ctypes.memmove(seen.data_ptr(), address, seen.nbytes)
        if not seen.eq(pressure.expected[number]).all():
            return f"behind the address: {seen.unique().tolist()[:4]} instead of {pressure.expected[number]}"
        pressure.use(draw.randrange(8))
    return pressure.check()


def read_aside(draw: random.Random, record: bool) -> str:
    """A side stream reads tensors that are freed immediately. The copies on the host are checked later."""
    pressure = Pressure(6, 6)
    side = torch.Stream("emu")
    main = torch.accelerator.current_stream()
    outs, expected = [], []
    for turn in range(10):
        x = full(100 + turn)
        for _ in range(draw.randrange(3)):
            pressure.use(draw.randrange(6))
        out = torch.zeros(FLOATS).pin_memory()
        side.wait_stream(main)
        with side:
            out.copy_(x, non_blocking=True)
        if record:
            x.record_stream(side)
        del x
        pressure.use(draw.randrange(6))
        outs.append(out)
        expected.append(100.0 + turn)
    side.synchronize()
    return compare(outs, expected, "read aside") or pressure.check()


@race()
def reads_aside(draw: random.Random) -> str:
    return read_aside(draw, record=True)


@race(wrong=True)
def reads_aside_and_does_not_say_so(draw: random.Random) -> str:
    return read_aside(draw, record=False)


def write_aside(draw: random.Random, wait: bool) -> str:
    """A side stream fills tensors that are being evicted."""
    pressure = Pressure()
    side = torch.Stream("emu")
    main = torch.accelerator.current_stream()
    for turn in range(10):
        number = draw.randrange(8)
        x = pressure.tensors[number]
        source = torch.full((FLOATS,), 100.0 + turn).pin_memory()
        side.wait_stream(main)
        with side:
            x.copy_(source, non_blocking=True)
        x.record_stream(side)
        pressure.expected[number] = 100.0 + turn
        for _ in range(draw.randrange(3)):
            pressure.use((number + 1 + draw.randrange(7)) % 8)
        if wait:
            main.wait_stream(side)
        pressure.use(number)
        if turn % 3 == 0:
            pressure.use_all()
    side.synchronize()
    return pressure.check()


@race()
def writes_aside(draw: random.Random) -> str:
    return write_aside(draw, wait=True)


@race(wrong=True)
def writes_aside_and_does_not_wait(draw: random.Random) -> str:
    return write_aside(draw, wait=False)


@race()
def frees_what_is_read_and_written(draw: random.Random) -> str:
    """A copy from pinned memory to device memory: both may be freed at once, and reused."""
    pressure = Pressure(4, 6)
    kept, expected = [], []
    for turn in range(12):
        source = torch.full((FLOATS,), 100.0 + turn).pin_memory()
        x = torch.empty(FLOATS, device="emu")
        x.copy_(source, non_blocking=True)
        del source
        reused = torch.full((FLOATS,), -1.0).pin_memory()
        if draw.random() < 0.5:
            kept.append(x)
            expected.append(100.0 + turn)
        del x, reused
        pressure.use(draw.randrange(4))
        if len(kept) > 4:
            wrong = compare(kept, expected, "filled")
            if wrong:
                return wrong
            kept, expected = kept[3:], expected[3:]
    return compare(kept, expected, "filled") or pressure.check()


@race(devices=2)
def moves_between_devices(draw: random.Random) -> str:
    """Copies between two devices that both exceed their budgets. Sources are freed immediately."""
    sides = [Pressure(device=0), Pressure(device=1)]
    for turn in range(10):
        here = draw.randrange(2)
        source, target = sides[here], sides[1 - here]
        number, other = draw.randrange(8), draw.randrange(8)
        copied = source.tensors[number].to(target.tensors[0].device)
        if turn % 3 == 0:
            copied = copied + 1
        target.tensors[other] = copied
        target.expected[other] = source.expected[number] + (1 if turn % 3 == 0 else 0)
        for side in sides:
            side.use(draw.randrange(8))
    return sides[0].check() or sides[1].check()


@race(threads=True)
def threads_share_a_storage(draw: random.Random) -> str:
    """Two threads read the same storages and write their own, each in its own order."""
    shared = Pressure(6, 9)
    threads = 2
    own = [[full(0) for _ in range(3)] for _ in range(threads)]
    expected = [[0.0] * 3 for _ in range(threads)]
    draws = [random.Random(draw.random()) for _ in range(threads)]

    def work(thread: int) -> str:
        for _ in range(16):
            number, mine = draws[thread].randrange(6), draws[thread].randrange(3)
            own[thread][mine].add_(shared.tensors[number])
            expected[thread][mine] += shared.expected[number]
        return RIGHT

    wrong = at_once([functools.partial(work, thread) for thread in range(threads)])
    if wrong:
        return wrong
    for thread in range(threads):
        wrong = compare(own[thread], expected[thread], f"thread {thread}'s")
        if wrong:
            return wrong
    return shared.check()


def train(first: str, second: str, share: float | None, draw: random.Random) -> list[torch.Tensor]:
    """A model of two halves, on these devices. The second device's budget is a share of its use."""
    torch.manual_seed(0)
    halves = [
        nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(3))).to(device)
        for device in (first, second)
    ]
    parameters = [parameter for half in halves for parameter in half.parameters()]
    if share is not None:
        # Weights, gradients and two moments.
        held = 4 * sum(parameter.nbytes for parameter in halves[1].parameters())
        torch_uvm.set_budget(max(int(share * held), 6 * MIB), torch.device(second).index or 0)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=draw.random() < 0.3)
    losses = []
    for _ in range(4):
        x = torch.randn(16, 512)
        loss = halves[1](halves[0](x.to(first)).to(second)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [result.detach().cpu() for result in [*losses, *parameters]]


def train_both(first: str, second: str, draw: random.Random) -> str:
    share, seed = draw.uniform(0.4, 0.9), draw.random()
    results = train(first, second, share, random.Random(seed))
    torch_uvm.set_budget(None)
    expected = train("cpu", "cpu", None, random.Random(seed))
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if not torch.equal(result, wanted):
            return f"result {number} differs by {(result - wanted).abs().max().item()}"
    return RIGHT


@race(seeds=4)
def evicts_while_it_goes_backward(draw: random.Random) -> str:
    return train_both("emu:0", "emu:0", draw)


@race(devices=2, seeds=4)
def goes_backward_on_two_devices(draw: random.Random) -> str:
    """Each device's half of backward runs on its own thread, and one device exceeds its budget."""
    return train_both("emu:0", "emu:1", draw)


@race()
def arenas_are_reset_under_a_side_stream(draw: random.Random) -> str:
    """A side stream fills and reads memory of an arena. The arena is then reset and used again."""
    pressure = Pressure(6, 14)
    side = torch.Stream("emu")
    main = torch.accelerator.current_stream()
    arena = torch_uvm.allocators.arena(initial="4MiB")
    outs, expected = [], []
    for turn in range(8):
        source = torch.full((FLOATS,), 100.0 + turn).pin_memory()
        out = torch.zeros(FLOATS).pin_memory()
        with arena:
            x = torch.empty(FLOATS, device="emu")
        side.wait_stream(main)
        with side:
            x.copy_(source, non_blocking=True)
            out.copy_(x, non_blocking=True)
        x.record_stream(side)
        del x
        arena.reset()
        pressure.use(draw.randrange(6))
        outs.append(out)
        expected.append(100.0 + turn)
    side.synchronize()
    return compare(outs, expected, "through the arena") or pressure.check()


#: The figures of `residency_stats` that are printed for a program, to show whether it reaches its race.
FIGURES = ["fetched", "written_back", "used_in_place", "moved", "made_room"]


def see(name: str, seed: int) -> tuple[str, dict[str, int]]:
    """Runs a program in this process, which has not used the accelerator yet: its error, and figures."""
    torch.set_num_threads(1)
    it = RACES[name]
    emulated.configure(seed=seed, devices=it.devices, **({"memory": it.memory} if it.memory else {}))
    torch_uvm.enable(budget=None)
    torch.ones((), device="emu", requires_grad=True).backward()  # two threads' first ones race in PyTorch
    seen = it.program(random.Random(seed))
    torch.accelerator.synchronize()
    stats = torch_uvm.stats()
    wrong = seen or _C.check_residency() or _C.check_allocator() or RIGHT
    return wrong, {figure: stats[figure]["count"] for figure in FIGURES}


def see_in_a_child(name: str, seed: int) -> tuple[str, dict[str, int]]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        faulthandler.enable()
        status = 1
        figures: dict[str, int] = {}
        try:
            seen, figures = see(name, seed)
            status = 0
        except BaseException:
            seen = traceback.format_exc()[-4096:]
        os.write(write, json.dumps([seen[:4096], figures]).encode())
        os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen, figures = json.loads(said) if said else (RIGHT, {})
    return (seen if status == 0 else f"exit status {status}: {seen}"), figures


def seeds_for(seconds: float, first: int) -> Iterator[int]:
    """Seeds from `first` on until the time is over; at least one."""
    end = time.monotonic() + seconds
    yield first
    for seed in itertools.count(first + 1):
        if time.monotonic() >= end:
            return
        yield seed


def judge(name: str, seeds: Iterable[int]) -> bool:
    """Prints the verdict on these schedules. Returns whether the program behaved as expected."""
    shown: list[tuple[int, str]] = []
    figures: Counter[str] = Counter()
    runs = 0
    for seed in seeds:
        runs += 1
        seen, counted = see_in_a_child(name, seed)
        figures.update(counted)
        if seen:
            shown.append((seed, seen))
    died = [(seed, seen) for seed, seen in shown if seen.startswith("exit status")]
    if RACES[name].wrong and not died:
        wrong = [] if shown else [f"{name}: none of {runs} seeds showed it"]
    else:
        wrong = [f"{name}, seed {seed}: {seen}" for seed, seen in (died or shown)[:3]]
        if shown:
            wrong.append(f"{name}: {len(shown)} of {runs} schedules are wrong")
    told = ", ".join(f"{figure} {count}" for figure, count in figures.items())
    print("\n".join(wrong) or f"{name}: {runs} schedules, as it should be ({told})", flush=True)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all if not said: {', '.join(RACES)}")
    parser.add_argument("--seeds", metavar="FIRST:LAST", help="from 0 on, as many as it has, if not said")
    parser.add_argument("--seconds", type=float, metavar="S", help="for each program, instead of LAST")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="races at a time; 1 if not said")
    parser.add_argument("--threads", action=argparse.BooleanOptionalAction, help="those whose threads race")
    options = parser.parse_intermixed_args()
    names = options.names or [name for name, it in RACES.items() if options.threads in (None, it.threads)]
    if len(names) == 1:
        seeds = options.seeds or f"0:{RACES[names[0]].seeds}"
        first, last = (int(end) for end in seeds.split(":"))
        chosen = range(first, last) if options.seconds is None else seeds_for(options.seconds, first)
        return int(not judge(names[0], chosen))
    passed_on = [
        *(["--seeds", options.seeds] if options.seeds else []),
        *(["--seconds", str(options.seconds)] if options.seconds is not None else []),
    ]

    def one(name: str) -> int:
        return subprocess.run([sys.executable, __file__, *passed_on, name], check=False).returncode

    with ThreadPoolExecutor(options.jobs) as pool:
        return int(any(list(pool.map(one, names))))


if __name__ == "__main__":
    sys.exit(main())
