"""Plots the cost of an allocation against the number of live blocks, from benchmarks/results/allocator.json.

python benchmarks/draw_growth.py [FILE]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
KIB = 1024


def written(size: int) -> str:
    if size < KIB:
        return f"{size} B"
    return f"{size // KIB} KiB" if size < KIB**2 else f"{size // KIB**2} MiB"


def draw(path: Path) -> None:
    """One line per size, for one thread."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "allocator.json").read_text())
    lines: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for figure in figures["allocator"]["figures"]:
        if figure["threads"] == 1:
            lines[figure["bytes"]].append((figure["live_blocks"], figure["ns"]))
    drawn, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for size, points in sorted(lines.items()):
        blocks, ns = zip(*sorted(points), strict=True)
        axes.plot(blocks, ns, marker="o", markersize=3, linewidth=1, label=written(size))
    axes.axhline(150, color="black", linewidth=0.8, linestyle="--", label="goal")
    axes.set(xscale="log", ylim=(0, None), xlabel="live blocks", ylabel="ns for allocate + free")
    axes.legend(loc="lower right", ncols=4, fontsize="small")
    drawn.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "growth.png")
