"""How results are written: JSON with one row a line, so that a new measurement is a short diff."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SHORT = 700  # characters


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document of results, and its folder if there is none.

    Raises:
        OSError: the file cannot be written.
        TypeError: the document holds something that JSON does not have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(one_row_a_line(document) + "\n")


def one_row_a_line(value: Any, indent: int = 0) -> str:
    """JSON in which a row is one line.

    A row is an element of a list, however long, or a short object without lists of objects. Everything else
    has a line for each of its members.
    """
    inner = " " * (indent + 1)
    if isinstance(value, list) and _rows(value):
        return "[\n" + ",\n".join(inner + json.dumps(row) for row in value) + "\n" + " " * indent + "]"
    if isinstance(value, Mapping) and (len(json.dumps(value)) > _SHORT or any(map(_rows, value.values()))):
        members = (f"{json.dumps(key)}: {one_row_a_line(value[key], indent + 1)}" for key in value)
        return "{\n" + ",\n".join(inner + member for member in members) + "\n" + " " * indent + "}"
    return json.dumps(value)


def _rows(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)
