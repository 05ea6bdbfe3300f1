"""Cards: a GPU and its host, from JSON profiles of the package or a user's (docs/plan.md has the format).

And rates of their links: those of an idle one, and what the residency engine reaches of them. Figures here
were measured on an H200, apart from the workloads that predictions are compared with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_uvm._util.arguments import did_you_mean
from torch_uvm._util.escaping import excerpt, printable

FORMAT = "torch_uvm card"
VERSION = 1
DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
EFFICIENCIES = ("matmul", "convolution", "attention", "memory")

_FOLDER = Path(__file__).resolve().parent.parent / "cards"
_LONGEST = 1 << 20  # characters
_FIGURES = ("memory_bytes", "memory_rate", "launch_us", "host_us")
_KEYS = ("format", "version", "name", *_FIGURES, "flops", "link")

#: The part of the link's rate that the engine's copies reach, because they are staged: 51 and 52.5 of 55.3
#: GB/s ("rates" in benchmarks/results/residency.json). Both ways: 98.1 of 100.7 ("staged" and "plain" in
#: benchmarks/results/copy_overlap.json).
_INTO, _OUT, _BOTH = 0.92, 0.95, 0.974
#: What a copy and operators that run for as long take together, in multiples of one of them: with copies into
#: the device, and out of it ("staged" in benchmarks/results/copy_overlap.json). Copies and operators both
#: take longer, and almost all copies are beside operators.
_LONGER_INTO, _LONGER_OUT = 1.17, 1.21
#: The host's time for a transfer, as a mixture of experts and T5 have shown it (docs/performance.md).
_TRANSFER_MS = 0.2


@dataclass(frozen=True)
class Card:
    """A GPU, and the host that feeds it. Rates are a second's, as data sheets give them (dense).

    An operator takes ``max(FLOPs / (rate * efficiency), bytes / (memory_rate * efficiency)) + launch_us``,
    a convolution the sum of both, on the device, and at least ``host_us``, which the host needs to queue it.

    Args:
        name: such as "h200".
        memory_bytes: of the device.
        flops: FLOP/s of dense matrix products by dtype: "float64", "float32", "tf32", "bfloat16",
            "float16", "float8". A dtype that is missing is taken as float32. "tf32" is used for what PyTorch
            computes in TF32: convolutions of float32, and products after `set_float32_matmul_precision`.
        memory_rate: bytes/s of the device's memory.
        launch_us: the least time of a kernel on the device.
        host_us: the least time that the host needs to run an eager operator.
        into, out, in_place: bytes/s of the link: copies to the device, copies to the host, and kernels
            that use host memory.
        both: bytes/s in all while copies go both ways; None: ``into`` and ``out`` together.
        in_place_written: bytes/s each way of kernels that read host memory and write to it; None: as
            ``in_place``.
        efficiency: the part of a rate that is reached, by "matmul", "convolution", "attention", "memory";
            missing: 1.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_rate: float
    launch_us: float
    host_us: float
    into: float
    out: float
    in_place: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    both: float | None = None
    in_place_written: float | None = None


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
    _check_keys(record, "a card", _KEYS, ("title", "units", "efficiency"))
    if not isinstance(record["name"], str) or not record["name"]:
        raise ValueError(f"name is {excerpt(record['name'])}; expected text")
    figures = {key: _figure(record[key], key) for key in _FIGURES}
    memory_bytes = int(figures.pop("memory_bytes"))
    # float32 stands for the dtypes that are missing.
    flops = _table(record["flops"], "flops", ("float32",), DTYPES)
    link = _table(record["link"], "link", ("into", "out", "in_place"), ("both", "in_place_written"))
    efficiency = _table(record.get("efficiency", {}), "efficiency", (), EFFICIENCIES)
    for key, value in efficiency.items():
        if value > 1:
            raise ValueError(f"efficiency.{key} is {value:g}; expected a part of the rate, at most 1")
    return Card(record["name"], memory_bytes, flops, **figures, **link, efficiency=efficiency)


def _check_keys(
    record: Mapping[str, Any], what: str, required: Sequence[str], optional: Sequence[str]
) -> None:
    accepted = list(dict.fromkeys((*required, *optional)))
    for key in record:
        if key not in accepted:
            raise ValueError(
                f"{what} has no {excerpt(key)}{did_you_mean(key, accepted)}; accepted: {', '.join(accepted)}"
            )
    if missing := [key for key in required if key not in record]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def _table(record: object, what: str, required: Sequence[str], optional: Sequence[str]) -> dict[str, float]:
    if not isinstance(record, dict):
        raise ValueError(f"{what} is {excerpt(record)}; expected an object")
    _check_keys(record, what, required, optional)
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


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second: the link to the device and to the host, and kernels that use host memory.

    The defaults are the highest that an H200 has shown, as in the profile "h200" of the emulated accelerator.

    Args:
        both: both directions together; None: as if each had the link for itself.
        transfer_ms: the host's time to start a transfer.
        slowed: what operators lose per time of copies beside them.
    """

    into: float = 55.4e9
    out: float = 55.4e9
    in_place: float = 51.2e9
    both: float | None = None
    transfer_ms: float = 0.0
    slowed: float = 0.0

    @property
    def together(self) -> float:
        """`both`, or what the directions reach alone."""
        return self.into + self.out if self.both is None else self.both


#: ``both`` by copies of plain memory, "plain" in benchmarks/results/copy_overlap.json.
H200 = LinkRates(both=100.7e9)


def link_rates(card: Card) -> LinkRates:
    """The rates of an idle link."""
    return LinkRates(card.into, card.out, card.in_place, card.both)


def rates_of_engine(card: Card) -> LinkRates:
    """The rates that the engine reaches beside operators. What is used in place is updated there."""
    return LinkRates(
        card.into * _INTO / _LONGER_INTO,
        card.out * _OUT / _LONGER_OUT,
        card.in_place_written or card.in_place,
        link_rates(card).together * _BOTH * 2 / (_LONGER_INTO + _LONGER_OUT),
        _TRANSFER_MS,
        1 - 1 / _LONGER_INTO,
    )
