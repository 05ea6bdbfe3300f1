"""Programs that run out of memory at different moments, on a device of 64 MiB with the default budget.

    python tests/_full_device.py (counted | uncounted) [PROGRAM ...]

Each ends with the bits that it has on the CPU. `uncounted`: the engine does not know
which kernels run, as on CUDA. Run with TORCH_UVM_DEVICE=emu; exit status 1 and a line for each program that
does not hold.
"""

from __future__ import annotations

import gc
import io
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
MEMORY = 64 * MIB
EMU = torch.device("emu", 0)
Program = Callable[[], list[torch.Tensor]]


class Place:
    """Where the programs run."""

    device = EMU


def layers(count: int, device: torch.device | str, width: int = 1024) -> nn.Module:
    """Linear layers, of 4 MiB each if 1024 wide."""
    return nn.Sequential(*[nn.Linear(width, width, bias=False, device=device) for _ in range(count)])


def fill(model: nn.Module) -> nn.Module:
    """Gives each parameter values that depend on nothing but its place."""
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight) / (30 + number))
    return model


def filled(count: int, width: int = 1024) -> nn.Module:
    return fill(layers(count, Place.device, width))


def inputs(rows: int) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 1024).view(rows, 1024).to(Place.device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 8) -> None:
    model(inputs(rows)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def construction() -> list[torch.Tensor]:
    model = filled(24)
    return list(model.parameters())


def load_state_dict() -> list[torch.Tensor]:
    saved = fill(layers(12, "cpu")).state_dict()
    models = [layers(12, Place.device), layers(12, "cpu").to(Place.device)]
    for model in models:
        model.load_state_dict(saved)
    return [parameter for model in models for parameter in model.parameters()]


def loading_to_the_device() -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(fill(layers(24, "cpu")).state_dict(), file)
    file.seek(0)
    return list(torch.load(file, map_location=Place.device).values())


def first_forward() -> list[torch.Tensor]:
    model = filled(10)
    return [model(inputs(2048))]  # activations of 8 MiB


def first_backward() -> list[torch.Tensor]:
    model = filled(10)
    model(inputs(512)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def optimizer_state() -> list[torch.Tensor]:
    model = filled(6)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        train(model, optimizer)
    return list(model.parameters())


def foreach_optimizer_state() -> list[torch.Tensor]:
    model = filled(6, width=512)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    held = [torch.full((MIB,), float(number), device=Place.device) for number in range(14)]
    for _ in range(2):
        model(inputs(8)[:, :512]).square().mean().backward()
        optimizer.step()
    return [*model.parameters(), *held]


def generation() -> list[torch.Tensor]:
    """A cache that grows beside weights, by concatenation, in inference mode."""
    model = filled(10)
    with torch.inference_mode():
        cache = inputs(256)
        for _ in range(16):
            cache = torch.cat([cache, model(cache[-8:]).repeat(8, 1)])
        held = [cache.clone() for _ in range(4)]
    return [cache.clone(), *held]


def second_thread() -> list[torch.Tensor]:
    made: list[torch.Tensor] = []

    def work() -> None:
        for number in range(12):
            made.append(torch.full((MIB,), float(number), device=Place.device))

    thread = threading.Thread(target=work)
    thread.start()
    mine = filled(8)
    for _ in range(8):
        mine(inputs(8))
    thread.join()
    return [*mine.parameters(), *sorted(made, key=lambda each: float(each[0]))]


def fall_asleep(model: nn.Module) -> None:
    """Trains, with steps that change nothing, until the engine no longer watches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(400):
        if Place.device != EMU:
            return
        train(model, optimizer)
        if not _C.is_watching():
            return
    raise AssertionError("the engine did not fall asleep")


def evaluation_between_steps() -> list[torch.Tensor]:
    model = filled(3)
    fall_asleep(model)
    results = []
    for rows in (512, 1024, 2048, 4096, 4096):  # at most 16 MiB each
        with torch.no_grad():
            results.append(model(inputs(rows)))
    return results


def second_model_after_a_sleep() -> list[torch.Tensor]:
    first = filled(3)
    fall_asleep(first)
    second = fill(layers(20, "meta").to_empty(device=Place.device))  # made by factory functions alone
    return [*first.parameters(), *second.parameters(), second(first(inputs(8)))]


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        construction,
        load_state_dict,
        loading_to_the_device,
        first_forward,
        first_backward,
        optimizer_state,
        foreach_optimizer_state,
        generation,
        second_thread,
        evaluation_between_steps,
        second_model_after_a_sleep,
    )
}


def results_of(program: Program) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [result.detach().cpu().clone() for result in program()]


def check(program: Program, counted: bool) -> dict[str, Any]:
    """Runs the program on the CPU and on the full device; returns the figures of that."""
    Place.device = torch.device("cpu")
    expected = results_of(program)
    Place.device = EMU
    torch_uvm.enable(budget="auto", limit=MEMORY)
    torch_uvm.memory.reset_residency_stats()
    torch_uvm.memory.reset_peak_memory_stats()
    _C.count_kernels(counted)
    try:
        results = results_of(program)
    finally:
        _C.count_kernels(True)
    figures = torch_uvm.stats()
    assert len(results) == len(expected)
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(result, wanted), f"result {number} differs"
    assert figures["over_budget"] == 0, f"over_budget {figures['over_budget']}"
    assert figures["written_back"]["count"] > 0, "it fits: nothing is tested"
    assert figures["peak_device_bytes"][EMU] <= MEMORY, figures["peak_device_bytes"]
    return figures


def main(counted: bool, names: list[str]) -> int:
    torch.set_num_threads(1)
    torch_uvm.emulated.configure(memory=MEMORY)
    wrong = 0
    for name in names or PROGRAMS:
        try:
            figures = check(PROGRAMS[name], counted)
            print(f"{name}: holds, {figures['written_back']['count']} written back")
        except Exception:
            wrong += 1
            print(f"{name}:", traceback.format_exc(), file=sys.stderr)
        gc.collect()
        torch_uvm.set_limit(None)
        torch_uvm.set_budget(None)
        torch_uvm.memory.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] == "counted", sys.argv[2:]))
