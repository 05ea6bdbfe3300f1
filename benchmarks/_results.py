"""Writes results as JSON with one row per line, so that a new measurement is a short diff."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document of results. Creates its folder if necessary.

    Raises:
        OSError: the file cannot be written.
        TypeError: the document holds something that JSON does not have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(one_row_a_line(document) + "\n")


def one_row_a_line(value: Any, indent: int = 0) -> str:
    """JSON with each row on one line, however long.

    Rows are the elements of a list of objects and the members of an object of objects. A container of rows
    has one line per member; everything else is on one line.
    """
    inner = " " * (indent + 1)
    if isinstance(value, list) and _contains_rows(value):
        return "[\n" + ",\n".join(inner + json.dumps(row) for row in value) + "\n" + " " * indent + "]"
    if isinstance(value, Mapping) and _contains_rows(value):
        members = (f"{json.dumps(key)}: {one_row_a_line(value[key], indent + 1)}" for key in value)
        return "{\n" + ",\n".join(inner + member for member in members) + "\n" + " " * indent + "}"
    return json.dumps(value)


def _contains_rows(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(each, Mapping) for each in value)
    if isinstance(value, Mapping) and value:
        members = value.values()
        return all(isinstance(each, Mapping) for each in members) or any(map(_contains_rows, members))
    return False
