"""The page: one HTML file that contains its pictures and style; it downloads and runs nothing.

Text from the script is untrusted: the templates escape every value, and the page's policy forbids scripts and
requests.
"""

from __future__ import annotations

import os
import re

from jinja2 import Environment
from markupsafe import Markup

from torch_uvm import _C
from torch_uvm._util.escaping import printable
from torch_uvm.report.advice import advice
from torch_uvm.report.allocation_sites import Storages
from torch_uvm.report.charts import pictures
from torch_uvm.report.facts import Facts
from torch_uvm.report.template import DOCUMENT, RUN

_MOST_ROWS = 20

#: Rows of the table of figures: names of totals, and their titles.
_TRANSFERS = {
    "fetched": "copied to a device",
    "written_back": "copied back to the host",
    "dropped_clean": "evicted without a copy: the host had the same bytes",
    "used_in_place": "used on the host by an operator, across the link",
    "moved": "within the device, to make room for a large request",
    "waited": "the host waited for a copy",
    "made_room": "the host waited for memory on the device",
}
_COUNTS = {
    "plan_hits": "operators that came as planned",
    "plan_misses": "operators that did not",
    "over_budget": "operators that needed more than the budget",
    "num_ooms": "requests that raised torch.OutOfMemoryError",
    "num_alloc_retries": "requests that were retried after the cache was released",
    "failures": "calls of the runtime that failed in the engine",
}


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes = int(seconds / 60)
    if minutes < 60:
        return f"{minutes} min {seconds - 60 * minutes:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _place(it: Storages) -> str:
    if it.file is not None:
        here = os.getcwd() + os.sep
        return f"{it.file.removeprefix(here)}:{it.line}"
    if it.before:
        return "made before the recording"
    return f"backward pass, {it.node}" if it.node else "made by no line of Python"


def _code_in_backticks(words: str) -> Markup:
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(Markup.escape(words))))


# Of what comes from outside also characters that control a terminal or the writing direction are escaped.
_environment = Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda it: printable(it) if isinstance(it, str) and not isinstance(it, Markup) else it,
)
_environment.filters |= {
    "count": lambda it: f"{int(it):,}",
    "duration": _seconds,
    "place": _place,
    "prose": _code_in_backticks,
    "size": lambda it: _C.format_bytes(int(it)),
}


def document(title: str, body: Markup) -> str:
    """A page with this body."""
    return _environment.from_string(DOCUMENT).render(title=title, body=body)


def page(facts: Facts) -> str:
    """The whole page of a run."""
    names = {it: f"device {it}, {facts.devices[it]}" for it in facts.peaks}
    body = _environment.from_string(RUN).render(
        facts=facts,
        advice=advice(facts),
        pictures=pictures(facts.samples, facts.step_ends, names, facts.budgets),
        # The most traffic first; of those without any, the largest.
        storages=facts.storages[:_MOST_ROWS],
        transfers=_TRANSFERS,
        counts=_COUNTS,
    )
    return document(facts.title, Markup(body))
