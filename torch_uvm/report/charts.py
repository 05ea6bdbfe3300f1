"""A report's pictures, as SVG inside the page. CSS classes give the colours."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_uvm import _C
from torch_uvm.report.samples import Sample

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 74, 16, 12, 30
_BINS = 180  # of rates, across the picture
_TIPS = 90  # regions with a tooltip
_TOLD = ("fetched.bytes", "written_back.bytes", "used_in_place.bytes", "waited.ms", "made_room.ms")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def nice_ticks(most: float, about: int = 5) -> list[float]:
    """From 0 up to at least ``most``, in steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / about
    power = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 1.0
    while power > rough:
        power /= 10
    step = next(power * it for it in (1, 2, 5, 10) if power * it >= rough)
    count = -int(-most // step)
    return [round(step * it, 12) for it in range(count + 1)]


def _number(value: float) -> str:
    return f"{value:.10g}"


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


@dataclass(frozen=True)
class _Frame:
    """The axes of one picture: seconds to the right, from ``low`` to ``high`` upwards."""

    seconds: float
    low: float
    high: float
    height: int

    def x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.seconds

    def y(self, value: float) -> float:
        inner = self.height - _TOP - _BOTTOM
        return _TOP + inner * (self.high - value) / (self.high - self.low)

    def axes(self, ticks: Sequence[float], label: str) -> list[str]:
        right = _WIDTH - _RIGHT
        drawn = []
        for tick in ticks:
            y = self.y(tick)
            kind = "axis" if tick == 0 else "grid"
            drawn.append(f'<line class="{kind}" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            drawn.append(_text(_LEFT - 8, y + 4, "end", _number(abs(tick))))
        times = nice_ticks(self.seconds, 6)
        for seconds in times:
            if seconds <= self.seconds:
                x = self.x(seconds)
                drawn.append(_text(x, self.height - 10, "middle", f"{_number(seconds)} s"))
        drawn.append(
            f'<text transform="translate(14 {(self.height - _BOTTOM + _TOP) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle">{html.escape(label)}</text>'
        )
        return drawn

    def area(self, kind: str, times: Sequence[float], upper: Sequence[float], lower: Sequence[float]) -> str:
        """Between two lines of steps: what was sampled holds until the next sample."""

        def line(values: Sequence[float]) -> list[str]:
            points = []
            for index, (time, value) in enumerate(zip(times, values, strict=True)):
                if index:
                    points.append(f"{self.x(time):.1f},{self.y(values[index - 1]):.1f}")
                points.append(f"{self.x(time):.1f},{self.y(value):.1f}")
            return points

        return f'<polygon class="{kind}" points="{" ".join(line(upper) + line(lower)[::-1])}"/>'

    def tips(self, words: Callable[[float, float], str]) -> list[str]:
        """Tooltips. ``words`` is called with the beginning and end of a region, in seconds."""
        width = (_WIDTH - _LEFT - _RIGHT) / _TIPS
        drawn = []
        for index in range(_TIPS):
            begin, end = index * self.seconds / _TIPS, (index + 1) * self.seconds / _TIPS
            drawn.append(
                f'<rect class="tip" x="{_LEFT + index * width:.1f}" y="{_TOP}" width="{width:.1f}" '
                f'height="{self.height - _TOP - _BOTTOM}">'
                f"<title>{html.escape(words(begin, end))}</title></rect>"
            )
        return drawn


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    said = html.escape(title)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{said}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _at(samples: Sequence[Sample], seconds: float) -> Sample:
    """The latest sample at that time."""
    low, high = 0, len(samples) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if samples[middle].seconds <= seconds else (low, middle - 1)
    return samples[low]


def memory(
    samples: Sequence[Sample], device: int | None, budget: int | None, steps: Sequence[float], title: str
) -> str:
    """Bytes on a device, with the budget; for a single device, pinned host bytes above.

    Args:
        device: None: managed bytes in total, if it is unknown which are on the device.
        steps: times at which to draw a line, in seconds.
    """
    times = [it.seconds for it in samples]
    below = [float(it.reserved if device is None else it.resident.get(device, 0)) for it in samples]
    above = [low + (it.host if device == 0 else 0) for low, it in zip(below, samples, strict=True)]
    most = max([*above, float(budget or 0), 1.0]) * 1.05
    unit, name = next(it for it in _UNITS if most >= it[0])
    ticks = nice_ticks(most / unit)
    frame = _Frame(max(times[-1], 1e-3), 0, ticks[-1], 250)
    zero = [0.0] * len(times)
    parts = frame.axes(ticks, name)
    scaled = [it / unit for it in below]
    parts.append(frame.area("managed" if device is None else "resident", times, scaled, zero))
    if above != below:
        parts.append(frame.area("host", times, [it / unit for it in above], scaled))
    for at in steps:
        x = frame.x(at)
        parts.append(
            f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{frame.height - _BOTTOM}"/>'
        )
    if budget is not None:
        y = frame.y(budget / unit)
        parts.append(f'<line class="budget" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')

    def words(begin: float, end: float) -> str:
        it = _at(samples, end)
        here = it.reserved if device is None else it.resident.get(device, 0)
        where = "managed" if device is None else "on the device"
        text = f"{it.seconds:.2f} s: {_C.format_bytes(here)} {where}"
        return text + (f", {_C.format_bytes(it.host)} on the host" if it.host else "")

    return _svg(frame.height, title, parts + frame.tips(words))


def rates(samples: Sequence[Sample], name: str, bins: int) -> list[float]:
    """The rate at which a total grew, per second, in each of ``bins`` over the whole time."""
    width = max(samples[-1].seconds, 1e-3) / bins
    grown = [0.0] * bins
    for before, after in zip(samples, samples[1:], strict=False):
        change = after.totals.get(name, 0) - before.totals.get(name, 0)
        if change <= 0:
            continue
        first = min(int(before.seconds / width), bins - 1)
        last = min(int(after.seconds / width), bins - 1)
        for index in range(first, last + 1):  # evenly over the time between two samples
            share = min(after.seconds, (index + 1) * width) - max(before.seconds, index * width)
            whole = after.seconds - before.seconds
            grown[index] += change * (max(share, 0) / whole if whole > 0 else 1 / (last - first + 1))
    return [it / width for it in grown]


def _fastest(samples: Sequence[Sample], names: Sequence[str]) -> float:
    """Mean bytes per second of copies while they were on the link; 0: none was timed."""
    last = samples[-1].totals
    count, ms = (sum(last.get(f"{name}.{what}", 0) for name in names) for what in ("bytes", "ms"))
    return 1e3 * count / ms if ms > 0 else 0.0


def carried(asked: Sequence[Sequence[float]], most: float) -> list[list[float]]:
    """Rates at which one direction of the link carried the requested bytes, for each bin.

    Samples count bytes when they are requested, which takes no time; the link carries them one after
    another.

    Args:
        asked: requested bytes per second, for each kind that uses the direction; equally many bins of each.
        most: the link's bytes per second; 0: unknown, and the result is `asked`.
    """
    if most <= 0:
        return [list(series) for series in asked]
    waiting = [0.0] * len(asked)
    carried: list[list[float]] = [[] for _ in asked]
    for now in zip(*asked, strict=True):
        waiting = [before + more for before, more in zip(waiting, now, strict=True)]
        share = min(1.0, most / sum(waiting)) if any(waiting) else 0.0
        for kind, count in enumerate(waiting):
            carried[kind].append(count * share)
            waiting[kind] -= count * share
    return carried


def link(samples: Sequence[Sample], title: str) -> str:
    """Bytes per second to the device above the line, back below it; at the bottom, when the host waited."""
    seconds = max(samples[-1].seconds, 1e-3)
    asked = {it: rates(samples, f"{it}.bytes", _BINS) for it in ("fetched", "written_back", "used_in_place")}
    fetching, writing = (_fastest(samples, [it]) for it in ("fetched", "written_back"))
    # What is used in place is not timed.
    to, in_place = carried([asked["fetched"], asked["used_in_place"]], fetching or writing)
    (back,) = carried([asked["written_back"]], writing or fetching)
    waited = [
        min(1.0, (one + two) / 1e3)
        for one, two in zip(
            rates(samples, "waited.ms", _BINS), rates(samples, "made_room.ms", _BINS), strict=True
        )
    ]
    unit, name = next(
        it
        for it in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
        if max(max(to), max(back), max(in_place), 1.0) >= it[0]
    )
    up = nice_ticks(max(max(to), max(in_place), max(back)) / unit, 2)
    frame = _Frame(seconds, -up[-1], up[-1], 230)
    parts = frame.axes([*(-it for it in up[:0:-1]), *up], f"back     {name}     to device")
    width = (_WIDTH - _LEFT - _RIGHT) / _BINS
    for kind, series, sign in (("in-place", in_place, 1), ("to-device", to, 1), ("back", back, -1)):
        for index, rate in enumerate(series):
            if rate > 0:
                top, bottom = sorted((frame.y(0), frame.y(sign * rate / unit)))
                parts.append(
                    f'<rect class="{kind}" x="{_LEFT + index * width:.1f}" y="{top:.1f}" '
                    f'width="{width:.2f}" height="{max(bottom - top, 0.5):.1f}"/>'
                )
    strip = frame.height - _BOTTOM - 7
    for index, share in enumerate(waited):
        if share > 0:
            parts.append(
                f'<rect class="waited" x="{_LEFT + index * width:.1f}" y="{strip}" width="{width:.2f}" '
                f'height="7" fill-opacity="{0.25 + 0.75 * share:.2f}"/>'
            )

    def words(begin: float, end: float) -> str:
        grown = {
            it: _at(samples, end).totals.get(it, 0) - _at(samples, begin).totals.get(it, 0) for it in _TOLD
        }
        return (
            f"{begin:.2f} to {end:.2f} s: {_C.format_bytes(int(grown['fetched.bytes']))} to the device, "
            f"{_C.format_bytes(int(grown['written_back.bytes']))} back, "
            f"{_C.format_bytes(int(grown['used_in_place.bytes']))} used in place, "
            f"{grown['waited.ms'] + grown['made_room.ms']:.1f} ms waited"
        )

    return _svg(frame.height, title, parts + frame.tips(words))
