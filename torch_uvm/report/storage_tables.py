"""The tables of storages: which lines made the storages with most traffic, and the largest ones."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence

from torch_uvm import _C
from torch_uvm._util.escaping import printable
from torch_uvm.report.allocation_sites import Storages
from torch_uvm.report.facts import Facts
from torch_uvm.report.markup import text

_MOST_ROWS = 20
_MOST_SOURCE = 110  # characters


def _place(it: Storages) -> str:
    if it.file is None:
        if it.before:
            return "made before the recording"
        return f"backward pass, <code>{text(it.node)}</code>" if it.node else "made by no line of Python"
    short = printable(it.file)
    if it.file.startswith(os.getcwd() + os.sep):
        short = printable(os.path.relpath(it.file))
    source = printable(it.source)
    if len(source) > _MOST_SOURCE:
        source = source[: _MOST_SOURCE - 3] + "..."
    shown = f'<code class="line">{html.escape(short)}:{it.line}</code>'
    if it.function and it.function != "<module>":
        shown += f" in <code>{text(it.function)}</code>"
    return shown + (f'<code class="source">{html.escape(source)}</code>' if source else "")


def _storage_rows(rows: Iterable[Storages]) -> str:
    lines = []
    for it in rows:
        size = _C.format_bytes(it.bytes) if it.bytes else "various"
        cells = (
            _C.format_bytes(it.traffic),
            *(f"{it.moved[kind]['count']:,}" for kind in ("fetched", "written_back", "used_in_place")),
            size,
            f"{it.made:,}",
            _C.format_bytes(it.most_bytes),
        )
        figures = "".join(f'<td class="figure">{cell}</td>' for cell in cells)
        lines.append(
            f'<tr data-bytes="{it.bytes}" data-traffic="{it.traffic}"><td>{_place(it)}</td>{figures}</tr>'
        )
    return "\n".join(lines)


_HEADS = ("made at", "traffic", "fetched", "back", "in place", "size of one", "made", "at once")


def _storage_table(key: str, rows: Sequence[Storages]) -> str:
    head = "".join(
        f'<th scope="col"{"" if index == 0 else " class=figure"}>{it}</th>' for index, it in enumerate(_HEADS)
    )
    return (
        f'<div class="wide"><table id="{key}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{_storage_rows(rows)}\n</tbody></table></div>"
    )


def storage_tables(facts: Facts) -> str:
    moved = [it for it in facts.storages if it.traffic][:_MOST_ROWS]
    largest = sorted(facts.storages, key=lambda it: -it.most_bytes)[:_MOST_ROWS]
    if not largest:
        return ""
    note = (
        '<p class="soft">Storages of at least 256 KiB, those of one size that one line made together. '
        "The line is the innermost one outside PyTorch's files and ours.</p>"
    )
    parts = ["<h2>Tensors by traffic</h2>", note]
    if moved:
        parts.append(_storage_table("by-traffic", moved))
    else:
        parts.append("<p>Nothing crossed the link.</p>")
    parts += ["<h2>Tensors by size</h2>", _storage_table("by-size", largest)]
    return "\n".join(parts)
