"""Training with the automatic budget on a device made small: plain memory takes all but a few GiB of it.

    python tests/_balloon.py [OUT.json]         on a GPU; with TORCH_UVM_DEVICE=emu on the emulator

Three loops of one program follow each other. The first fits in the budget. The second needs half as much
again as the budget. The third is the first again. The engine becomes idle in the first loop, works in the
second, and becomes idle in the third. Losses and parameters equal, bit for bit, those of the same program in
plain memory, which runs last. Prints a table.

On a GPU the balloon leaves 8 GiB. The limit of managed memory is half of what is free beside the balloon
(_gpu_guard.py).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for equal matrix products, before CUDA starts

import torch
from _gpu_guard import GIB, MIB, Guard, balloon, check_room, room_beside_a_balloon
from torch import nn

import torch_uvm
from torch_uvm import _C

LEFT = 8 * GIB  # beside the balloon, on a GPU
EMULATED = 512 * MIB  # of memory; the balloon leaves half of it
LAYERS = 32
STATES = 0.4  # of the budget: parameters, gradients and moments
ACTIVATIONS = 1.1  # of the budget, in the loop that exceeds it
STEPS = {"fits": 16, "exceeds": 4, "fits again": 32}


@dataclass
class Sizes:
    """Of a network of LAYERS square layers, and of its batches, all in float32."""

    width: int
    rows: dict[str, int]  # by loop

    @classmethod
    def for_budget(cls, budget: int) -> Sizes:
        # A parameter takes 16 bytes with its gradient and moments; a layer saves its input and GELU's.
        width = int((STATES * budget / (16 * LAYERS)) ** 0.5) // 64 * 64
        rows = int(ACTIVATIONS * budget / (8 * width * LAYERS))
        return cls(width, {"fits": rows // 16, "exceeds": rows, "fits again": rows // 16})


@dataclass
class Loop:
    """Counters of one loop. ``watched``: of each step, the operators that the engine saw."""

    name: str
    rows: int
    watched: list[int]
    fetched: int  # bytes
    written_back: int  # bytes
    seconds: float

    @property
    def idle_steps(self) -> int:
        """Steps at the end that ran unwatched."""
        idle = 0
        while idle < len(self.watched) and self.watched[-1 - idle] == 0:
            idle += 1
        return idle


def batches(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(1)
    for name, steps in STEPS.items():
        for _ in range(steps):
            yield name, torch.randn(sizes.rows[name], sizes.width, generator=chance).to(device)


def train(sizes: Sizes, device: torch.device) -> tuple[list[torch.Tensor], list[Loop]]:
    """Returns the losses and the final parameters, on the CPU, and what the engine did."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(sizes.width, sizes.width, bias=False), nn.GELU()) for _ in range(LAYERS)
    ]
    model = nn.Sequential(*layers)
    for weight in model.parameters():  # else values become denormal, with which CPUs are 60 times slower
        nn.init.kaiming_normal_(weight)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[torch.Tensor] = []
    loops: dict[str, Loop] = {}
    before = torch_uvm.stats()
    for name, batch in batches(sizes, device):
        begin = time.perf_counter()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().cpu())
        del batch, loss
        loop = loops.setdefault(name, Loop(name, sizes.rows[name], [], 0, 0, 0.0))
        loop.seconds += time.perf_counter() - begin
        now = torch_uvm.stats()
        loop.watched.append(sum(now[key] - before[key] for key in ("plan_hits", "plan_misses")))
        loop.fetched += now["fetched"]["bytes"] - before["fetched"]["bytes"]
        loop.written_back += now["written_back"]["bytes"] - before["written_back"]["bytes"]
        before = now
    return losses + [each.detach().cpu() for each in model.parameters()], list(loops.values())


def main() -> int:
    if _C.backend() == "emulated":
        torch_uvm.emulated.configure(memory=EMULATED)
    here = torch.accelerator.current_accelerator()
    assert here is not None
    device = torch.device(here.type, 0)
    module = torch.get_device_module(device)
    if device.type == "cuda":
        check_room(LEFT // 2)
        torch.ones(64, 64, device=device).mm(torch.ones(64, 64, device=device))  # cuBLAS's own memory
        held = balloon(LEFT, device)
        guard = Guard(room_beside_a_balloon()).hold()
    else:
        held = balloon(EMULATED // 2, device)
        guard = Guard(room_beside_a_balloon({"emu": lambda: [module.mem_get_info(device)[0]]})).hold()
    torch_uvm.enable(budget="auto")
    budget = torch_uvm.get_budget(device)
    assert budget is not None
    free = module.mem_get_info(device)[0]
    sizes = Sizes.for_budget(budget)
    print(
        f"{device.type}: {free / GIB:.3f} GiB free beside the balloon, "
        f"limit {guard.limit / GIB:.3f}, automatic budget {budget / GIB:.3f}"
    )
    found, loops = train(sizes, device)
    guard.check()
    figures = torch_uvm.stats()
    peak = torch_uvm.memory.max_memory_reserved(device)
    wrong = _C.check_residency()
    torch_uvm.disable()
    gc.collect()
    torch_uvm.memory.empty_cache()
    del held
    module.empty_cache()
    expected, _ = train(sizes, device)
    equal = len(found) == len(expected) and all(map(torch.equal, found, expected))

    print(f"{'loop':<12}{'rows':>8}{'steps':>7}{'idle at end':>13}{'GB in':>8}{'GB out':>8}{'ms a step':>11}")
    for loop in loops:
        each = loop.seconds * 1e3 / len(loop.watched)
        print(
            f"{loop.name:<12}{loop.rows:>8}{len(loop.watched):>7}{loop.idle_steps:>13}"
            f"{loop.fetched / 1e9:>8.2f}{loop.written_back / 1e9:>8.2f}{each:>11.1f}"
        )
    by_name = {loop.name: loop for loop in loops}
    promises = {
        "idle once the program fits": by_name["fits"].idle_steps > 0,
        "moves what exceeds the budget": by_name["exceeds"].written_back > 0,
        "idle again once it fits": by_name["fits again"].idle_steps > 0,
        "managed memory stays below the limit": peak <= guard.limit,
        "no call of the runtime failed": figures["failures"] == 0,
        "the engine is consistent": wrong is None,
        "equal bits": equal,
    }
    for name, kept in promises.items():
        print(f"{'yes' if kept else 'NO':<4}{name}")
    if len(sys.argv) > 1:
        document = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "emulated",
            "torch": torch.__version__,
            "free_beside_the_balloon": free,
            "limit": guard.limit,
            "budget": budget,
            "peak_reserved": peak,
            "loops": [asdict(loop) for loop in loops],
            "statistics": {key: figures[key] for key in sorted(figures) if not key.endswith("device_bytes")},
            "promises": promises,
        }
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
