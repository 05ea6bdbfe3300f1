"""A plan's picture: the predicted step over the budget, its lower bound, the card and the knee."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_uvm import _C
from torch_uvm._util.escaping import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 1 << 30
_STEP, _BOUND, _CARD, _KNEE = "#2a6f97", "#606c38", "#c1121f", "#bc6c25"


def make_figure(record: Mapping[str, Any]) -> Figure:
    """Args:
        record: what `record_of` returns.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    axes = figure.subplots()
    points = [it for it in record["points"] if it["step_ms"] is not None]
    axes.plot(
        [it["budget"] / _GIB for it in points],
        [it["step_ms"] for it in points],
        marker="o",
        color=_STEP,
        label="predicted step",
    )
    bounds = [it for it in points if it["bound_ms"] is not None]
    if bounds:
        axes.plot(
            [it["budget"] / _GIB for it in bounds],
            [it["bound_ms"] for it in bounds],
            marker="o",
            markersize=4,
            linestyle="--",
            color=_BOUND,
            label="lower bound, any policy",
        )
    axes.axhline(record["in_core_ms"], color="#999999", linewidth=1, label="in core")
    for it in points:
        if it["budget"] == record["knee_bytes"]:
            label = f"knee, {_C.format_bytes(it['budget'])}"
            axes.plot(it["budget"] / _GIB, it["step_ms"], "D", color=_KNEE, markersize=9, label=label)
    widest = max([it["budget"] for it in record["points"]], default=0)
    if record["room_bytes"] <= widest:
        label = f"{record['card']}, {_C.format_bytes(record['room_bytes'])}"
        axes.axvline(record["room_bytes"] / _GIB, color=_CARD, linewidth=1.5, label=label)
    axes.axvspan(0, record["least_bytes"] / _GIB, color="#eeeeee", label="too little for an operator")
    axes.set_xlim(0, widest / _GIB * 1.05 if widest else 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget, GiB")
    axes.set_ylabel("step, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(
        f"{printable(record['of'])} on {record['card']}: peak {_C.format_bytes(record['peak_bytes'])}, "
        f"{record['in_core_ms']:.1f} ms a step in core",
        fontsize=10,
        loc="left",
    )
    return figure
