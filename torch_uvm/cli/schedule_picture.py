"""A schedule's picture: memory, operators and both directions of the link, over one predicted iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_uvm import _C
from torch_uvm._tools.predictions import Prediction, Span
from torch_uvm._tools.schedules import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_RESIDENT, _BUDGET, _OPERATOR, _IN_PLACE, _INTO, _OUT = (
    "#2a6f97",
    "#c1121f",
    "#444444",
    "#606c38",
    "#2a6f97",
    "#bc6c25",
)


def _draw_memory(axes: Axes, schedule: Schedule, found: Prediction) -> None:
    unit, name = next(it for it in _UNITS if schedule.budget >= it[0])
    times, levels = [at for at, _ in found.memory], [level / unit for _, level in found.memory]
    axes.fill_between(
        [*times, found.step_ms * schedule.steps],
        [*levels, levels[-1]],
        step="post",
        color=_RESIDENT,
        label="storages on the device",
    )
    label = f"for storages, {_C.format_bytes(schedule.capacity)}"
    axes.axhline(schedule.capacity / unit, color=_BUDGET, linewidth=1.5, label=label)
    axes.set_ylabel(name)
    axes.set_ylim(bottom=0)


def _lane(axes: Axes, row: int, spans: list[Span], color: str, label: str) -> None:
    bars = [(max(it.begin_ms, 0.0), it.end_ms - max(it.begin_ms, 0.0)) for it in spans]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, label=label)


def make_figure(schedule: Schedule, found: Prediction) -> Figure:
    """Memory above, lanes of operators and of the link below.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_memory(above, schedule, found)
    uses = [any(use.in_place for use in op.uses) for op in schedule.operators]
    _lane(below, 2, [it for it in found.compute if not uses[it.number]], _OPERATOR, "operators")
    _lane(
        below, 2, [it for it in found.compute if uses[it.number]], _IN_PLACE, "... that use the host's copies"
    )
    _lane(below, 1, found.into, _INTO, "to the device")
    _lane(below, 0, found.out, _OUT, "to the host")
    below.set_yticks([2, 1, 0], ["operators", "in", "out"])
    below.set_xlim(0, found.step_ms * schedule.steps)
    below.set_xlabel("ms")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        # Outside the axes, where it covers no data.
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    slower = found.step_ms / schedule.in_core_ms
    above.set_title(
        f"{len(schedule.operators)} operators, {len(schedule.transfers)} transfers; predicted "
        f"{found.step_ms:.2f} ms, {slower:.2f} times in core",
        fontsize=10,
        loc="left",
    )
    return figure
