"""Draws pictures of the documents, into docs/images.

    python benchmarks/draw.py growth     # the cost of an allocation, by the number of live blocks
    python benchmarks/draw.py plan       # the allocation plan of a small transformer's training step
    TORCH_UVM_DEVICE=emu python benchmarks/draw.py trace     # training under a budget, as `plot` does

In the plan each rectangle is an allocation: from the event that makes it to the event that frees it, and over
its bytes. In the trace parameters, gradients and moments of ten layers are 160 MiB; the budget is 96 MiB.
"""

from __future__ import annotations

import json
import sys
import tempfile
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
from torch_uvm.cli import plot
from torch_uvm.traces import read_trace

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


def trace(path: Path) -> None:
    torch_uvm.enable(budget="96MiB")
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    layers = [module for _ in range(10) for module in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "trace.jsonl"
        with torch_uvm.tools.record_accesses(recorded):
            for _ in range(5):
                model(torch.randn(1024, 1024, device=device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        plot.draw(read_trace(recorded), path)


if __name__ == "__main__":
    name = sys.argv[1]
    {"growth": growth, "plan": plan, "trace": trace}[name](ROOT / "docs" / "images" / f"{name}.png")
