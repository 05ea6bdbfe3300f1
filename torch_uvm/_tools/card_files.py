"""Card profiles: JSON files, those of the package and a user's (docs/plan.md has the format)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_uvm._tools.cards import Card
from torch_uvm._util.arguments import did_you_mean
from torch_uvm._util.escaping import excerpt, printable

FORMAT = "torch_uvm card"
VERSION = 1
DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
EFFICIENCIES = ("matmul", "convolution", "attention", "memory")

_FOLDER = Path(__file__).resolve().parent.parent / "cards"
_LONGEST = 1 << 20  # characters
_HEAD = ("format", "version", "name", "title", "units")
_FIGURES = ("memory_bytes", "memory_rate", "launch_us", "host_us")
_LINK = ("into", "out", "in_place", "both", "in_place_written")
_OPTIONAL = ("title", "units", "efficiency", "both", "in_place_written")


def card_names() -> list[str]:
    """The names of the package's cards."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_card(name: str | Path) -> Card:
    """A card of the package by its name, or a user's by the path of its file, which ends in .json.

    Raises:
        ValueError: an unknown name, or a file that does not fit the format; says what is accepted.
        OSError: the file cannot be read.
    """
    text = str(name)
    if not text.endswith(".json"):
        known = card_names()
        if text.lower() not in known:
            raise ValueError(
                f"there is no card {excerpt(text)}{did_you_mean(text.lower(), known)}; accepted: "
                f"{', '.join(known)}, or a file that ends in .json (docs/plan.md has its format)"
            )
        name = _FOLDER / f"{text.lower()}.json"
    with open(name, encoding="utf-8", errors="replace") as file:
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise ValueError(f"{printable(name)}: longer than {_LONGEST} characters; a card has about 3000")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{printable(name)}: no card, because it is no JSON: {error}") from None
    try:
        return _card(record)
    except ValueError as error:
        raise ValueError(f"{printable(name)}: {error}") from None


def _card(record: object) -> Card:
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
        raise ValueError(f'no card; it begins with {{"format": "{FORMAT}", "version": {VERSION}, ...}}')
    _check_keys(record, (*_HEAD, *_FIGURES, "flops", "link", "efficiency"), "a card")
    if not isinstance(record["name"], str) or not record["name"]:
        raise ValueError(f"name is {excerpt(record['name'])}; expected text")
    figures = {key: _figure(record[key], key) for key in _FIGURES}
    flops = _table(record["flops"], "flops", DTYPES)
    if "float32" not in flops:
        raise ValueError("flops lacks float32, which stands for the dtypes that are missing")
    link = _table(record["link"], "link", _LINK)
    _check_keys(link, _LINK, "link")
    efficiency = _table(record.get("efficiency", {}), "efficiency", EFFICIENCIES)
    for key, value in efficiency.items():
        if value > 1:
            raise ValueError(f"efficiency.{key} is {value:g}; expected a part of the rate, at most 1")
    return Card(
        name=record["name"],
        memory_bytes=int(figures["memory_bytes"]),
        flops=flops,
        memory_rate=figures["memory_rate"],
        launch_us=figures["launch_us"],
        host_us=figures["host_us"],
        into=link["into"],
        out=link["out"],
        in_place=link["in_place"],
        efficiency=efficiency,
        both=link.get("both"),
        in_place_written=link.get("in_place_written"),
    )


def _check_keys(record: Mapping[str, Any], accepted: tuple[str, ...], what: str) -> None:
    for key in record:
        if key not in accepted:
            raise ValueError(
                f"{what} has no {excerpt(key)}{did_you_mean(key, accepted)}; accepted: {', '.join(accepted)}"
            )
    if missing := [key for key in accepted if key not in record and key not in _OPTIONAL]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def _table(record: object, what: str, accepted: tuple[str, ...]) -> dict[str, float]:
    if not isinstance(record, dict):
        raise ValueError(f"{what} is {excerpt(record)}; expected an object of {', '.join(accepted)}")
    for key in record:
        if key not in accepted:
            raise ValueError(
                f"{what} has no {excerpt(key)}{did_you_mean(key, accepted)}; accepted: {', '.join(accepted)}"
            )
    return {key: _figure(value, f"{what}.{key}") for key, value in record.items()}


def _figure(value: object, what: str) -> float:
    """A number, or ``{"value": number, "source": text}``."""
    if isinstance(value, dict):
        if value.keys() != {"value", "source"} or not isinstance(value["source"], str):
            raise ValueError(f'{what} is {excerpt(value)}; expected {{"value": ..., "source": "..."}}')
        value = value["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} is {excerpt(value)}; expected a number")
    if not (math.isfinite(value) and 0 < value < 1e18):
        raise ValueError(f"{what} is {excerpt(value)}; expected more than 0, and less than 1e18")
    return float(value)
