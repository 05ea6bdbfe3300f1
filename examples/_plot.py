"""The picture of the demo: who is where on the emulated device, over modelled time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt

MIB = 1 << 20


def plot_residency(stats: dict[str, Any], path: Path) -> None:
    """Draws managed bytes, resident bytes and the capacity of device 0.

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

    figure, axes = plt.subplots(figsize=(8, 4), dpi=130, layout="constrained")
    axes.fill_between(seconds, managed_mib, step="post", color="#c9d7e8", label="managed, anywhere")
    axes.fill_between(seconds, resident_mib, step="post", color="#2a6f97", label="resident on the device")
    axes.axhline(capacity, color="#c1121f", linewidth=1.4, linestyle="--")
    axes.annotate(
        f"device memory, {capacity:.0f} MiB",
        (seconds[-1], capacity),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
        color="#c1121f",
    )
    axes.set_xlim(0, seconds[-1])
    axes.set_ylim(0, max(managed_mib) * 1.12)
    axes.set_xlabel("modelled time of memory traffic, s")
    axes.set_ylabel("MiB")
    axes.set_title(
        "A GPT trains in four times its device's memory (modelled, emulated accelerator)", fontsize=11
    )
    axes.legend(loc="upper right", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
