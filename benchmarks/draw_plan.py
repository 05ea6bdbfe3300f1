"""Draws the allocation plan of a small transformer's training step: docs/images/plan.png.

    python benchmarks/draw_plan.py [FILE]

Each rectangle is an allocation: from the event that makes it to the event that frees it, and over its bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.patches import Rectangle
from torch import nn

import torch_uvm

MIB = 1 << 20


def plan_of_a_step() -> dict[str, list[tuple[int, int, int, int]] | int]:
    device = torch.accelerator.current_accelerator()
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    batch = torch.randn(8, 64, 256).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        with torch_uvm.allocation_plan("a step") as plan:
            model(batch).square().mean().backward()
    return plan.report()


def draw(report: dict[str, list[tuple[int, int, int, int]] | int], path: Path) -> None:
    layout, planned, peak = report["layout"], report["planned_bytes"], report["peak_live_bytes"]
    assert isinstance(layout, list) and isinstance(planned, int) and isinstance(peak, int)
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    colours = mpl.colormaps["tab20"]
    for number, (offset, size, begin, end) in enumerate(layout):
        place = Rectangle((begin, offset / MIB), end - begin, size / MIB, facecolor=colours(number % 20))
        place.set(edgecolor="white", linewidth=0.3)
        axes.add_patch(place)
    axes.axhline(peak / MIB, color="black", linewidth=0.8, linestyle="--", label="live at once, at most")
    axes.set(xlim=(0, max(end for *_, end in layout)), ylim=(0, planned / MIB * 1.02))
    axes.set(xlabel="allocations and frees of one step", ylabel="MiB of the plan's segment")
    axes.set_title(
        f"{len(layout)} allocations in {planned / MIB:.1f} MiB, {planned / peak:.3f} of what lives at once"
    )
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(plan_of_a_step(), Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/plan.png"))
