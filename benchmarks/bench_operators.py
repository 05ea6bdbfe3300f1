"""The cost of operators on the emulated accelerator, compared with the CPU.

Each case is timed on the CPU, on `emu` with torch_uvm off (plain device memory), and on `emu` with it on
(managed memory). The three alternate in one process, because only ratios within a process are meaningful.

    python benchmarks/bench_operators.py [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before torch is imported; selects emu on machines with a GPU.
os.environ.setdefault("TORCH_UVM_DEVICE", "emu")

import torch
import torch.nn.functional as F
from _results import describe, write_results

import torch_uvm

Call = Callable[[], object]
Case = Callable[[torch.device], Call]

PLACES = {
    "cpu": ("cpu", torch_uvm.disabled),
    "emu_off": ("emu", torch_uvm.disabled),
    "emu_on": ("emu", torch_uvm.enabled),
}
REPETITIONS, SLICE_MS = 25, 4.0


def tensors(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random tensors with the same values on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def of(call: Callable[..., object], *shapes: tuple[int, ...]) -> Case:
    """A call of an operator on tensors of these shapes."""

    def make(device: torch.device) -> Call:
        operands = tensors(device, *shapes)
        return lambda: call(*operands)

    return make


def empty(elements: int) -> Case:
    return lambda device: lambda: torch.empty(elements, device=device)


def index(device: torch.device) -> Call:
    (x,) = tensors(device, (1024, 64))
    rows = torch.randint(1024, (256,), generator=torch.Generator().manual_seed(0)).to(device)
    return lambda: x[rows]


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
    "view": of(lambda x: x.view(4096), (64, 64)),
    "add, 8 floats": of(torch.add, (8,), (8,)),
    "add, 1 M floats": of(torch.add, (1 << 20,), (1 << 20,)),
    "matmul, 64": of(torch.matmul, (64, 64), (64, 64)),
    "matmul, 1024": of(torch.matmul, (1024, 1024), (1024, 1024)),
    "layer_norm, 512 x 384": of(lambda *it: F.layer_norm(it[0], (384,), *it[1:]), (512, 384), (384,), (384,)),
    "softmax, 512 x 256": of(lambda x: F.softmax(x, dim=-1), (512, 256)),
    "conv2d, 4 x 16 x 32 x 32, 3 x 3": of(
        lambda x, weight, bias: F.conv2d(x, weight, bias, padding=1), (4, 16, 32, 32), (16, 16, 3, 3), (16,)
    ),
    "attention, causal, 4 x 6 x 128 x 64": of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[(4, 6, 128, 64)] * 3
    ),
    "cat, 8 of 64 x 64": of(lambda *parts: torch.cat(parts), *[(64, 64)] * 8),
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


def measure(case: Case) -> dict[str, float]:
    """Median nanoseconds per call, by place. Repetitions alternate, so that drift affects all alike."""
    calls: dict[str, tuple[Call, int]] = {}
    for place, (device, scope) in PLACES.items():
        with scope():
            call = case(torch.device(device))
            nanoseconds(call, 3)  # warm the caches, including the allocator's
            calls[place] = call, max(1, int(SLICE_MS * 1e6 / nanoseconds(call, 10)))
    times: dict[str, list[float]] = {place: [] for place in PLACES}
    for _ in range(REPETITIONS):
        for place, (_, scope) in PLACES.items():
            with scope():
                times[place].append(nanoseconds(*calls[place]))
    return {place: statistics.median(each) for place, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains it")
    args = parser.parse_args()
    torch.set_num_threads(1)  # measure the operator, not the wake-up of threads
    torch_uvm.emulated.configure(memory="4GiB")
    environment = describe(["python", "benchmarks/bench_operators.py", *sys.argv[1:]]) | {"threads": 1}
    print("\nAn operator on the emulated accelerator against the CPU, ns a call (medians)")
    print(f"{'':38}" + "".join(f"{head:>13}" for head in [*PLACES, "off / cpu", "on / cpu"]))
    results: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        if args.only in name:
            cpu, *emu = measure(case).values()
            cells = [f"{each:,.0f}" for each in (cpu, *emu)] + [f"{each / cpu:.2f}" for each in emu]
            print(f"{name:38}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
            figures = zip(PLACES, (cpu, *emu), strict=True)
            results[name] = {f"{place}_ns": round(each) for place, each in figures}
    if args.json:
        write_results(args.json, {"environment": environment, "operators": results})


if __name__ == "__main__":
    main()
