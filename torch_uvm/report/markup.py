"""Text and numbers in a page. Text from outside (names, paths, source) goes through `text`."""

from __future__ import annotations

import html
import re

from torch_uvm import _C
from torch_uvm._util.escaping import printable


def text(value: object) -> str:
    """Escapes text for a page: markup, and characters that control a terminal or the writing direction."""
    return html.escape(printable(value))


def prose(value: object) -> str:
    """The package's own text, with code in backticks; quotes from outside are escaped as in `text`."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", text(value))


def figure(key: str, value: float, shown: str) -> str:
    """A formatted number, with its exact value for programs."""
    return f'<data id="{html.escape(key)}" value="{value}">{html.escape(shown)}</data>'


def byte_figure(key: str, count: float) -> str:
    return figure(key, int(count), _C.format_bytes(int(count)))


def count_figure(key: str, count: float) -> str:
    return figure(key, count, f"{int(count):,}")
