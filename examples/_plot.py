"""The picture of the demo: who is where on the emulated device, over modelled time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

MIB = 1 << 20
MANAGED, RESIDENT, CAPACITY = "#c9d7e8", "#2a6f97", "#c1121f"


def growth_end(seconds: list[float], managed: list[float]) -> float:
    """When managed memory first was what it is at its peak."""
    return seconds[managed.index(max(managed))]


def plot_residency(stats: dict[str, Any], path: Path) -> None:
    """Draws managed bytes, resident bytes and the capacity of device 0: the beginning, and the whole run.

    Args:
        stats: what ``python -m torch_uvm run --stats`` wrote on the emulated accelerator.
        path: the PNG to write.
    """
    device = stats["emulated"]["devices"][0]
    capacity = device["memory"] / MIB
    time, resident, _, managed = zip(*device["timeline"], strict=True)
    seconds = [each / 1e6 for each in time]
    resident_mib = [each / MIB for each in resident]
    managed_mib = [each / MIB for each in managed]

    def draw(axes: Axes, until: float, title: str) -> None:
        axes.fill_between(seconds, managed_mib, step="post", color=MANAGED, label="managed, wherever it is")
        axes.fill_between(seconds, resident_mib, step="post", color=RESIDENT, label="resident on the device")
        axes.axhline(
            capacity, color=CAPACITY, linewidth=1.5, label=f"the device's memory, {capacity:.0f} MiB"
        )
        axes.set_xlim(0, until)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("modelled time, s")
        axes.spines[["top", "right"]].set_visible(False)

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 4), dpi=130, layout="constrained", sharey=True, width_ratios=[2, 3]
    )
    draw(left, min(seconds[-1], 1.6 * growth_end(seconds, managed_mib)), "the first steps")
    draw(right, seconds[-1], "the whole run")
    left.set_ylabel("MiB")
    left.set_ylim(0, max(*managed_mib, capacity) * 1.05)
    ratio = max(managed_mib) / capacity
    figure.suptitle(
        f"Training with {ratio:.1f} times the device's memory, on the emulated accelerator (modelled)",
        fontsize=11,
    )
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
    plt.close(figure)
