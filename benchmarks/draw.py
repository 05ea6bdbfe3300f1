"""Draws pictures of the documents, into docs/images.

    python benchmarks/draw.py growth     # the cost of an allocation, by the number of live blocks
    python benchmarks/draw.py plan       # the allocation plan of a small transformer's training step

In the plan each rectangle is an allocation: from the event that makes it to the event that frees it, and over
its bytes.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import torch
from _results import RESULTS, ROOT
from matplotlib import pyplot
from matplotlib.patches import Rectangle
from torch import nn

import torch_uvm

MIB = 1 << 20


def growth(path: Path) -> None:
    """One line per size, for one thread, from allocator.json."""
    document = json.loads((RESULTS / "allocator.json").read_text())
    lines: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for figure in document["allocator"]:
        if figure["threads"] == 1:
            lines[figure["bytes"]].append((figure["live_blocks"], figure["ns"]))
    drawn, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for size, points in sorted(lines.items()):
        blocks, ns = zip(*sorted(points), strict=True)
        label = torch_uvm._C.format_bytes(size).replace(".00", "")
        axes.plot(blocks, ns, marker="o", markersize=3, linewidth=1, label=label)
    axes.axhline(150, color="black", linewidth=0.8, linestyle="--", label="goal")
    axes.set(xscale="log", ylim=(0, None), xlabel="live blocks", ylabel="ns for allocate + free")
    axes.legend(loc="lower right", ncols=4, fontsize="small")
    drawn.savefig(path, dpi=110)


def plan(path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    batch = torch.randn(8, 64, 256).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        with torch_uvm.allocators.allocation_plan("a step") as made:
            model(batch).square().mean().backward()
    report = made.report()
    layout, planned, peak = report["layout"], report["planned_bytes"], report["peak_live_bytes"]
    assert isinstance(layout, list) and isinstance(planned, int) and isinstance(peak, int)
    drawn, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    colours = mpl.colormaps["tab20"]
    for number, (offset, size, begin, end) in enumerate(layout):
        place = Rectangle((begin, offset / MIB), end - begin, size / MIB, facecolor=colours(number % 20))
        place.set(edgecolor="white", linewidth=0.3)
        axes.add_patch(place)
    axes.axhline(peak / MIB, color="black", linewidth=0.8, linestyle="--", label="live at once, at most")
    axes.set(xlim=(0, max(end for *_, end in layout)), ylim=(0, planned / MIB * 1.02))
    axes.set(xlabel="allocations and frees of one step", ylabel="MiB of the plan's segment")
    ratio = f"{planned / peak:.3f} of what lives at once"
    axes.set_title(f"{len(layout)} allocations in {planned / MIB:.1f} MiB, {ratio}")
    axes.legend(loc="upper right")
    drawn.savefig(path, dpi=110)


if __name__ == "__main__":
    name = sys.argv[1]
    {"growth": growth, "plan": plan}[name](ROOT / "docs" / "images" / f"{name}.png")
