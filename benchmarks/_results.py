"""How results are written: JSON with one row a line, so that a new measurement is a short diff."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document of results, and its folder if there is none.

    Raises:
        OSError: the file cannot be written.
        TypeError: the document holds something that JSON does not have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(one_row_a_line(document) + "\n")


def one_row_a_line(value: Any, indent: int = 0) -> str:
    """JSON in which a row is one line, however long.

    Rows are the elements of a list of objects, and the members of an object of objects. What contains rows
    has a line for each of its members; everything else is one line.
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
