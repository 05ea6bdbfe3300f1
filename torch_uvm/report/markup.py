"""Text and figures as they stand in a page. What others wrote (names, paths, source) goes through `text`."""

from __future__ import annotations

import html
import re

from torch_uvm import _C
from torch_uvm._util.escaping import printable


def text(value: object) -> str:
    """For a page: what controls a terminal or the direction of writing is written out, markup is escaped."""
    return html.escape(printable(value))


def prose(value: object) -> str:
    """Words of ours, with code in backticks; what they quote of others is escaped as in `text`."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", text(value))


def figure(key: str, value: float, shown: str) -> str:
    """A figure for people, that programs can read, too."""
    return f'<data id="{html.escape(key)}" value="{value}">{html.escape(shown)}</data>'


def byte_figure(key: str, count: float) -> str:
    return figure(key, int(count), _C.format_bytes(int(count)))


def count_figure(key: str, count: float) -> str:
    return figure(key, count, f"{int(count):,}")
