"""The cost of operators on the emulated accelerator, compared with the CPU.

Each case is timed on the CPU, on `emu` with torch_uvm off (plain device memory), and on `emu` with it on
(managed memory). The three alternate in one process, because only ratios within a process are meaningful.

    python benchmarks/bench_operators.py --json FILE
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Set before torch is imported; selects emu on machines with a GPU.
os.environ.setdefault("TORCH_UVM_DEVICE", "emu")

import torch
import torch.nn.functional as F
from _environment import describe
from _results import write_results

import torch_uvm

Call = Callable[[], object]
Case = Callable[[torch.device], Call]

PLACES = ("cpu", "emu, off", "emu, on")


def tensors(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random tensors with the same values on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def add(elements: int) -> Case:
    def make(device: torch.device) -> Call:
        a, b = tensors(device, (elements,), (elements,))
        return lambda: a + b

    return make


def matmul(size: int) -> Case:
    def make(device: torch.device) -> Call:
        a, b = tensors(device, (size, size), (size, size))
        return lambda: a @ b

    return make


def layer_norm(device: torch.device) -> Call:
    x, weight, bias = tensors(device, (512, 384), (384,), (384,))
    return lambda: F.layer_norm(x, (384,), weight, bias)


def conv2d(device: torch.device) -> Call:
    x, weight, bias = tensors(device, (4, 16, 32, 32), (16, 16, 3, 3), (16,))
    return lambda: F.conv2d(x, weight, bias, padding=1)


def softmax(device: torch.device) -> Call:
    (x,) = tensors(device, (512, 256))
    return lambda: F.softmax(x, dim=-1)


def attention(device: torch.device) -> Call:
    query, key, value = tensors(device, *[(4, 6, 128, 64)] * 3)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def cat(device: torch.device) -> Call:
    parts = tensors(device, *[(64, 64)] * 8)
    return lambda: torch.cat(parts)


def index(device: torch.device) -> Call:
    (x,) = tensors(device, (1024, 64))
    rows = torch.randint(1024, (256,), generator=torch.Generator().manual_seed(0)).to(device)
    return lambda: x[rows]


def view(device: torch.device) -> Call:
    (x,) = tensors(device, (64, 64))
    return lambda: x.view(4096)


def empty(elements: int) -> Case:
    return lambda device: lambda: torch.empty(elements, device=device)


def adamw(*, fused: bool) -> Case:
    """A step over 20 parameters of 64 x 64."""

    def make(device: torch.device) -> Call:
        parameters = tensors(device, *[(64, 64)] * 20)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused, foreach=not fused).step

    return make


def train_mlp(device: torch.device) -> Call:
    """Forward and backward of two small layers: a step that is mostly overhead."""
    x, first, second = tensors(device, (16, 64), (64, 64), (64, 64))
    first.requires_grad_()
    second.requires_grad_()

    def step() -> None:
        loss = (torch.relu(x @ first) @ second).sum()
        torch.autograd.grad(loss, (first, second))

    return step


CASES: dict[str, Case] = {
    "empty + free, 4 KiB": empty(1024),
    "empty + free, 16 MiB": empty(4 << 20),
    "view": view,
    "add, 8 floats": add(8),
    "add, 1 M floats": add(1 << 20),
    "matmul, 64": matmul(64),
    "matmul, 1024": matmul(1024),
    "layer_norm, 512 x 384": layer_norm,
    "softmax, 512 x 256": softmax,
    "conv2d, 4 x 16 x 32 x 32, 3 x 3": conv2d,
    "attention, causal, 4 x 6 x 128 x 64": attention,
    "cat, 8 of 64 x 64": cat,
    "index, 256 of 1024 rows": index,
    "AdamW foreach, 20 x 64 x 64": adamw(fused=False),
    "AdamW fused, 20 x 64 x 64": adamw(fused=True),
    "forward + backward, small": train_mlp,
}


def nanoseconds(call: Call, loops: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - begin) / loops


def measure(case: Case, repetitions: int, slice_ms: float) -> dict[str, float]:
    """Median nanoseconds per call, by place. Repetitions alternate, so that drift affects all alike."""
    places = [
        (torch.device("cpu"), torch_uvm.disabled),
        (torch.device("emu"), torch_uvm.disabled),
        (torch.device("emu"), torch_uvm.enabled),
    ]
    calls: list[Call] = []
    for device, scope in places:
        with scope():
            calls.append(case(device))
    loops: list[int] = []
    for call, (_, scope) in zip(calls, places, strict=True):
        with scope():
            nanoseconds(call, 3)  # warm the caches, including the allocator's
            loops.append(max(1, int(slice_ms * 1e6 / nanoseconds(call, 10))))
    times: list[list[float]] = [[] for _ in places]
    for _ in range(repetitions):
        for each, call, count, (_, scope) in zip(times, calls, loops, places, strict=True):
            with scope():
                each.append(nanoseconds(call, count))
    return {place: statistics.median(each) for place, each in zip(PLACES, times, strict=True)}


def format_row(name: str, cells: Iterable[str]) -> str:
    return f"{name:38}" + "".join(f"{cell:>13}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--repetitions", type=int, default=25, help="medians are of so many (default: 25)")
    parser.add_argument("--slice-ms", type=float, default=4.0, help="length of a repetition (default: 4)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains it")
    args = parser.parse_args()

    torch.set_num_threads(1)  # measure the operator, not the wake-up of threads
    torch_uvm.emulated.configure(memory="4GiB")
    environment = describe(["python", "benchmarks/bench_operators.py", *sys.argv[1:]]) | {"threads": 1}
    print("\nAn operator on the emulated accelerator against the CPU, ns a call (medians)")
    print(format_row("", [*PLACES, "off / cpu", "on / cpu"]))
    results: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        if args.only not in name:
            continue
        times = measure(case, args.repetitions, args.slice_ms)
        cpu, off, on = (times[place] for place in PLACES)
        ratios = [f"{off / cpu:.2f}", f"{on / cpu:.2f}"]
        print(format_row(name, [f"{each:,.0f}" for each in (cpu, off, on)] + ratios), flush=True)
        results[name] = {"cpu_ns": round(cpu), "emu_off_ns": round(off), "emu_on_ns": round(on)}
    if args.json:
        write_results(args.json, {"environment": environment, "operators": results})


if __name__ == "__main__":
    main()
