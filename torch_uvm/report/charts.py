"""A report's pictures, as SVG inside the page: bytes over time. CSS classes give the colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from torch_uvm import _C
from torch_uvm._util.escaping import printable
from torch_uvm.report.samples import Sample

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 240, 74, 16, 12, 30
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_LINK = (
    ("to-device", "fetched.bytes", "to the device"),
    ("back", "written_back.bytes", "back to the host"),
    ("in-place", "used_in_place.bytes", "used in place on the host"),
)


@dataclass(frozen=True)
class Series:
    """A line of bytes at the times of the samples. ``kind`` is its CSS class."""

    kind: str
    name: str
    values: Sequence[float]


def nice_ticks(most: float, about: int = 5) -> list[float]:
    """From 0 up to at least ``most``, in steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / about))
    step = next(power * it for it in (1, 2, 5, 10) if power * it >= most / about)
    return [round(step * it, 12) for it in range(1 - int(-most // step))]


def _picture(
    title: str, times: Sequence[float], series: Sequence[Series], budget: int | None, steps: Sequence[float]
) -> Markup:
    """Lines over time, each at its value until the next sample.

    Args:
        budget: draws a line at so many bytes.
        steps: times at which to draw a line, in seconds.
    """
    seconds = max(times[-1], 1e-3)
    most = max([1.0, budget or 0.0, *(value for it in series for value in it.values)]) * 1.02
    unit, unit_name = next(it for it in _UNITS if most >= it[0])
    ticks = nice_ticks(most / unit)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(at: float) -> float:
        return _LEFT + (right - _LEFT) * at / seconds

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * value / (ticks[-1] * unit)

    def line(kind: str, begin: tuple[float, float], end: tuple[float, float]) -> str:
        (x1, y1), (x2, y2) = begin, end
        return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'

    def text(at_x: float, at_y: float, anchor: str, words: str) -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{words}</text>'

    def parts() -> Iterator[str]:
        for tick in ticks:
            at = y(tick * unit)
            yield line("grid" if tick else "axis", (_LEFT, at), (right, at))
            yield text(_LEFT - 8, at + 4, "end", f"{tick:.10g} {unit_name}" if tick else "0")
        for tick in nice_ticks(seconds, 6):
            if tick <= seconds:
                yield text(x(tick), _HEIGHT - 10, "middle", f"{tick:.10g} s")
        for it in series:
            corners = [f"{x(times[0]):.1f},{y(it.values[0]):.1f}"]
            for at, before, value in zip(times[1:], it.values, it.values[1:], strict=False):
                corners += [f"{x(at):.1f},{y(before):.1f}", f"{x(at):.1f},{y(value):.1f}"]
            yield f'<polyline class="{it.kind}" points="{" ".join(corners)}"/>'
        for at in steps:
            yield line("step", (x(at), _TOP), (x(at), bottom))
        if budget is not None:
            yield line("budget", (_LEFT, y(budget)), (right, y(budget)))

    keys = [(it.kind, it.name) for it in series]
    if budget is not None:
        keys.append(("budget", f"budget, {_C.format_bytes(budget)}"))
    if steps:
        keys.append(("step", "the first steps"))
    legend = Markup("").join(
        Markup('<i class="{}"></i>{}').format(kind, printable(name)) for kind, name in keys
    )
    return Markup(
        '<figure><svg viewBox="0 0 {} {}" role="img" aria-label="{}">\n{}\n</svg>'
        "<figcaption>{}</figcaption></figure>"
    ).format(_WIDTH, _HEIGHT, printable(title), Markup("\n".join(parts())), legend)


def pictures(
    samples: Sequence[Sample], steps: Sequence[float], names: Mapping[int, str], budgets: Mapping[int, int]
) -> Markup:
    """Memory over time of each device, and the bytes that crossed the link.

    Args:
        steps: times at which to draw a line, in seconds.
        names: of the devices that have bytes. Empty: only managed bytes in total are known.
        budgets: of devices that have one.
    """
    times = [it.seconds for it in samples]
    drawn = [Markup("<h2>Memory over time</h2>")]
    host = Series("host", "on the host", [it.host for it in samples])
    on_host = [host] if any(host.values) else []
    if not names:
        name = "managed memory, wherever it is"
        series = [Series("managed", "managed", [it.reserved for it in samples]), *on_host]
        drawn.append(_picture(f"Memory over time: {name}", times, series, None, steps))
    for device, name in sorted(names.items()):
        here = Series("resident", f"on {name}", [it.resident.get(device, 0) for it in samples])
        series = [here, *(on_host if device == min(names) else [])]
        drawn.append(_picture(f"Memory over time: {name}", times, series, budgets.get(device), steps))
    link = [Series(kind, name, [it.totals.get(key, 0) for it in samples]) for kind, key, name in _LINK]
    if any(it.values[-1] for it in link):
        drawn.append(Markup("<h2>Link</h2>"))
        drawn.append(_picture("Bytes over the link, from the beginning", times, link, None, steps))
    return Markup("\n").join(drawn)
