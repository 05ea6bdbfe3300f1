"""The page: one HTML file that contains its pictures and style; it downloads and runs nothing.

Text from the script is untrusted and escaped (markup.py); the page's policy also forbids scripts and
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_uvm import _C
from torch_uvm._util.escaping import printable
from torch_uvm.report import charts
from torch_uvm.report.advice import advice
from torch_uvm.report.facts import Facts
from torch_uvm.report.markup import byte_figure, count_figure, figure, prose, text
from torch_uvm.report.samples import Sample, crossed
from torch_uvm.report.storage_tables import storage_tables
from torch_uvm.report.style import CSS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

#: Rows of the table of figures: names of totals, and their titles.
_FIGURES = (
    ("fetched", "copied to a device"),
    ("written_back", "copied back to the host"),
    ("dropped_clean", "evicted without a copy: the host had the same bytes"),
    ("used_in_place", "used on the host by an operator, across the link"),
    ("moved", "within the device, to make room for a large request"),
    ("waited", "the host waited for a copy"),
    ("made_room", "the host waited for memory on the device"),
)
_COUNTS = (
    ("plan_hits", "operators that came as planned"),
    ("plan_misses", "operators that did not"),
    ("over_budget", "operators that needed more than the budget"),
    ("num_ooms", "requests that raised torch.OutOfMemoryError"),
    ("num_alloc_retries", "requests that were retried after the cache was released"),
    ("failures", "calls of the runtime that failed in the engine"),
)


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    if seconds < 0.1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest:.0f} s"


def _tile(name: str, value: str, below: str = "") -> str:
    small = f"<small>{below}</small>" if below else ""
    return f"<div><dt>{name}</dt><dd>{value}{small}</dd></div>"


def _device_name(facts: Facts, device: int) -> str:
    name = facts.devices.get(device, "")
    return f"device {device}" + (f", {name}" if name else "")


def _tiles(facts: Facts) -> str:
    tiles = [_tile("run time", figure("seconds", facts.seconds, _seconds(facts.seconds)))]
    for device, peak in sorted(facts.peaks.items()):
        budget = facts.budgets.get(device)
        of = "no budget" if budget is None else f"of {byte_figure(f'budget-{device}', budget)}"
        more = f" {device}" if len(facts.peaks) > 1 else ""
        tiles.append(_tile(f"peak on device{more}", byte_figure(f"peak-{device}", peak), of))
    tiles += [
        _tile("peak of managed memory", byte_figure("peak-managed", facts.most_reserved)),
        _tile("peak on the host, pinned", byte_figure("peak-host", facts.most_host)),
    ]
    for key, name in (("fetched", "to the device"), ("written_back", "back to the host")):
        count = int(facts.total(f"{key}.count"))
        tiles.append(
            _tile(name, byte_figure(f"tile-{key}", facts.total(f"{key}.bytes")), f"{count:,} copies")
        )
    waited, room = (facts.total(f"{key}.ms") / 1e3 for key in ("waited", "made_room"))
    shown = figure("waited-seconds", waited + room, _seconds(waited + room))
    tiles.append(_tile("host waited", shown, f"{_seconds(waited)} for copies, {_seconds(room)} for room"))
    hits, misses = facts.total("plan_hits"), facts.total("plan_misses")
    if hits + misses:
        share = hits / (hits + misses)
        below = f"{int(misses):,} were not"
        tiles.append(_tile("operators as planned", figure("planned", share, f"{100 * share:.1f} %"), below))
    tiles.append(_tile("optimizer steps", count_figure("steps", facts.samples[-1].steps)))
    return f'<dl class="tiles">\n{chr(10).join(tiles)}\n</dl>'


def _advice(facts: Facts) -> str:
    items = (
        f'<li class="{it.kind}" id="advice-{it.key}"><b>{prose(it.title)}</b>'
        f"<span>{prose(it.text)}</span></li>"
        for it in advice(facts)
    )
    return f'<h2>Advice</h2>\n<ul class="advice">\n{chr(10).join(items)}\n</ul>'


def _key(kind: str, name: str) -> str:
    return f'<i class="{kind}"></i>{name}'


def pictures(
    samples: Sequence[Sample], steps: Sequence[float], names: Mapping[int, str], budgets: Mapping[int, int]
) -> str:
    """Memory over time of each device, and the link.

    Args:
        steps: times at which to draw a line, in seconds.
        names: of the devices that have bytes. Empty: only managed bytes in total are known.
        budgets: of devices that have one.
    """
    drawn = ["<h2>Memory over time</h2>"]
    on_host = any(it.host for it in samples)
    shown: list[int | None] = [*sorted(names)] or [None]
    for device in shown:
        if device is None:
            name, keys = "managed memory, wherever it is", [_key("managed", "managed")]
            budget = None
        else:
            name = names[device]
            budget = budgets.get(device)
            keys = [_key("resident", f"on {text(name)}")]
            if device == 0 and on_host:
                keys.append(_key("host", "on the host"))
            if budget is not None:
                keys.append(_key("budget", f"budget, {_C.format_bytes(budget)}"))
        if steps:
            keys.append(_key("step", "the first steps"))
        picture = charts.memory(samples, device, budget, steps, f"Memory over time: {printable(name)}")
        drawn.append(f"<figure>{picture}<figcaption>{''.join(keys)}</figcaption></figure>")
    if crossed(samples):
        keys = [
            _key("to-device", "to the device"),
            _key("back", "back to the host"),
            _key("in-place", "used in place on the host"),
            _key("waited", "the host waited"),
        ]
        drawn.append("<h2>Link</h2>")
        picture = charts.link(samples, "Bytes a second over the link, over time")
        drawn.append(f"<figure>{picture}<figcaption>{''.join(keys)}</figcaption></figure>")
    return "\n".join(drawn)


def _all_figures(facts: Facts) -> str:
    rows = []
    for key, words in _FIGURES:
        cells = (
            count_figure(f"{key}.count", facts.total(f"{key}.count")),
            byte_figure(f"{key}.bytes", facts.total(f"{key}.bytes")),
            figure(f"{key}.ms", facts.total(f"{key}.ms"), f"{facts.total(f'{key}.ms'):.1f}"),
        )
        figures = "".join(f'<td class="figure">{cell}</td>' for cell in cells)
        rows.append(f'<tr><th scope="row"><code>{key}</code><br>{words}</th>{figures}</tr>')
    waited = facts.total("waited.ms") + facts.total("made_room.ms")
    in_all = figure("waited-in-all.ms", waited, f"{waited:.1f}")
    rows.append(
        '<tr><th scope="row">host waited, in all<br><code>waited</code> and <code>made_room</code></th>'
        f'<td></td><td></td><td class="figure">{in_all}</td></tr>'
    )
    for key, words in _COUNTS:
        rows.append(
            f'<tr><th scope="row"><code>{key}</code><br>{words}</th>'
            f'<td class="figure">{count_figure(key, facts.total(key))}</td><td></td><td></td></tr>'
        )
    return (
        '<h2>All figures</h2><div class="wide"><table id="figures"><thead><tr><th scope="col">figure</th>'
        '<th scope="col" class="figure">count</th><th scope="col" class="figure">bytes</th>'
        '<th scope="col" class="figure">ms</th></tr></thead>'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _settings(facts: Facts) -> str:
    def or_none(count: int | None) -> str:
        return "none" if count is None else _C.format_bytes(count)

    rows = (
        ("requested budget", facts.asked),
        ("limit of managed memory", or_none(facts.limit)),
        ("limit of pinned host memory", or_none(facts.host_limit)),
        ("optimizer", facts.optimizer),
        ("optimizers that made steps", ", ".join(facts.optimizers) or "none"),
        ("accelerator", f"{facts.backend}; " + ", ".join(facts.devices.values())),
        ("versions", f"torch_uvm {facts.torch_uvm}, torch {facts.torch}, Python {facts.python}"),
    )
    lines = "\n".join(f'<tr><th scope="row">{name}</th><td>{text(value)}</td></tr>' for name, value in rows)
    return f'<h2>Settings</h2><div class="wide"><table id="settings"><tbody>{lines}</tbody></table></div>'


def document(title: str, parts: Iterable[str]) -> str:
    """A page of these parts. ``title`` is text."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>torch_uvm: {text(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>",
        f"<h1>{text(title)}</h1>",
    )
    return "\n".join([*head, *(part for part in parts if part), "</main>\n</body>\n</html>\n"])


def page(facts: Facts) -> str:
    """The whole page."""
    rank = "" if facts.rank is None else f", rank {facts.rank}"
    names = {device: _device_name(facts, device) for device in facts.peaks}
    parts = (
        f'<p class="soft" id="ended">{text(facts.began)}; {text(facts.ended)}</p>',
        _tiles(facts),
        _advice(facts),
        pictures(facts.samples, [it.seconds for it in facts.by_step], names, facts.budgets),
        storage_tables(facts),
        _all_figures(facts),
        _settings(facts),
    )
    return document(f"{facts.script}{rank}", parts)
