"""The picture of the demo: bytes resident on the emulated device, without and with the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

MIB, GIB = 1 << 20, 1 << 30
RESIDENT, CAPACITY = "#2a6f97", "#c1121f"


def plot_residency(driver: dict[str, Any], engine: dict[str, Any], working_set: int, path: Path) -> None:
    """Draws the bytes resident on device 0 for two runs of the same script, over one axis of modelled time.

    Args:
        driver, engine: the output of ``python -m torch_uvm run --stats`` on the emulated accelerator, with
            ``--budget none`` and with a budget.
        working_set: the script's peak of bytes in use, wherever they are.
        path: the PNG to write.
    """
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 4.6), dpi=130, layout="constrained", sharex=True, sharey=True
    )
    until = 1.02 * max(run["emulated"]["time_us"] for run in (driver, engine)) / 1e6
    _draw(above, driver, until, "residency left to the driver: pages move when they are touched")
    _draw(
        below,
        engine,
        until,
        "the residency engine: storages are copied before they are needed, or used on the host",
    )
    capacity = driver["emulated"]["devices"][0]["memory"] / MIB
    for axes in (above, below):
        axes.axhline(
            capacity, color=CAPACITY, linewidth=1.5, label=f"the device's memory, {capacity:.0f} MiB"
        )
        axes.axhline(
            working_set / MIB,
            color=CAPACITY,
            linewidth=1.2,
            linestyle=":",
            label=f"what the script has in use, {working_set / MIB:.0f} MiB",
        )
        axes.set_ylabel("MiB")
    above.set_ylim(0, max(working_set / MIB, capacity) * 1.1)
    above.set_xlim(0, until)
    below.set_xlabel("modelled time of memory traffic, s")
    figure.suptitle(
        f"Training with {working_set / MIB / capacity:.1f} times the device's memory, "
        "on the emulated accelerator (modelled)",
        fontsize=11,
    )
    handles, labels = above.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _draw(axes: Axes, stats: dict[str, Any], until: float, title: str) -> None:
    time, resident, _, _ = zip(*stats["emulated"]["devices"][0]["timeline"], strict=True)
    end = stats["emulated"]["time_us"] / 1e6
    axes.fill_between(
        [*(each / 1e6 for each in time), end],
        [*(each / MIB for each in resident), resident[-1] / MIB],
        step="post",
        color=RESIDENT,
        label="resident on the device",
    )
    axes.axvline(end, color=RESIDENT, linewidth=1)
    counters = stats["emulated"]["counters"]
    moved = {
        "migrated": counters["bytes_to_device"] + counters["bytes_to_host"],
        "copied": counters["bytes_copied_to_device"] + counters["bytes_copied_to_host"],
        "used in place": counters["bytes_in_place"],
    }
    shown = ", ".join(f"{count / GIB:.1f} GiB {how}" for how, count in moved.items() if count > GIB / 20)
    axes.annotate(
        f"  after {end:.2f} s: {counters['faults_on_device']:,} page faults  \n  {shown}  ",
        (end, 0.5),
        xycoords=("data", "axes fraction"),
        horizontalalignment="right" if end > until / 2 else "left",
        color=RESIDENT,
        fontsize=9,
    )
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
