"""Reads and checks traces of accesses, which `record_accesses` writes (docs/annex.md).

A trace may come from an untrusted source. Reading runs nothing, and what does not fit the format raises an
error with the line's number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_uvm._util.escaping import excerpt, printable

FORMAT = "torch_uvm accesses"
VERSION = 5
#: Version 1 has no `took`, version 2 no `ran`, version 3 no `workspace`, version 4 no `held`.
READ_VERSIONS = (1, 2, 3, 4, VERSION)
TRANSFERS = ("fetch", "write_back", "drop", "in_place")

_LONGEST_LINE = 64 << 20  # characters; about 20 for each operand of an operator
_MOST_LINES = 1 << 24  # all lines are kept in memory, about 500 bytes each
_MOST_BYTES = 2**63 - 1
_MOST_DEVICES = 1024


@dataclass(frozen=True)
class Storage:
    """Bytes that operators use. ``resident``: on the device at the trace's first mention of it."""

    device: int
    bytes: int
    resident: bool


@dataclass(frozen=True)
class Operator:
    """An outermost operator; storages are numbers.

    ``births`` and ``deaths`` are storages created and freed before the next operator. ``workspace``: bytes
    that it had allocated at most, beyond operands and results.
    """

    name: str
    time_us: float
    in_place_ok: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    births: list[int] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)
    workspace: int = 0


@dataclass(frozen=True)
class Transfer:
    """``kind`` is one of `TRANSFERS`; ``operators`` is how many had begun before it.

    Args:
        time_us: when it was requested.
        took_us: duration of the copy on the link, without waiting; None: not measured.
    """

    kind: str
    storage: int
    bytes: int
    time_us: float
    operators: int
    took_us: float | None = None


@dataclass(frozen=True)
class Resident:
    """``bytes`` that storages have on ``device`` after ``operators`` have begun."""

    device: int
    bytes: int
    operators: int


@dataclass(frozen=True)
class OperatorGroup:
    """Device time of ``operators`` consecutive operators, the first of which is number ``first``, from 0.

    The time is what the device took, or what the host took to queue the operators if that was longer. It
    excludes transfers, and waits for operands and for the memory of results.
    """

    first: int
    operators: int
    us: float


@dataclass
class Trace:
    """The records, in order.

    ``budgets`` by device, in bytes; None: no budget. ``groups``: in order of their operators; operators may
    be missing. ``steps``: how many operators had begun by the end of each marked step. ``holds``: how many
    had begun whenever the device was made to wait, so that the host got ahead.
    """

    budgets: tuple[int | None, ...] = ()
    storages: dict[int, Storage] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    groups: list[OperatorGroup] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    resident: list[Resident] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    holds: list[int] = field(default_factory=list)

    def time_of(self, operators: int) -> float:
        """Microseconds at which the latest of the first ``operators`` had begun."""
        return self.operators[operators - 1].time_us if operators else self.begin_us

    @property
    def begin_us(self) -> float:
        """The earliest time in the trace."""
        times = [it.time_us for it in self.operators[:1]] + [it.time_us for it in self.transfers]
        return min(times, default=0.0)


def read_trace(path: str | Path, progress: Callable[[int, int], object] | None = None) -> Trace:
    """Reads and checks a trace.

    Args:
        path: the file.
        progress: called from time to time with the bytes read and the size of the file.

    Raises:
        ValueError: it is not a trace, has another version, or a line does not fit; names file and line.
        OSError: it cannot be read.
    """
    reader = _Reader()
    number = done = 0
    size = os.stat(path).st_size
    with open(path, encoding="utf-8", errors="strict") as file:
        try:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                done += len(line)
                if progress is not None and number % 4096 == 0:
                    progress(done, size)
                if len(line) == _LONGEST_LINE:
                    raise ValueError(f"longer than {_LONGEST_LINE} characters")
                if number > _MOST_LINES:
                    raise ValueError(f"more than {_MOST_LINES} lines")
                if not line.endswith("\n"):
                    raise ValueError("the last line is cut off; was the recording stopped?")
                reader.line(line, first=number == 1)
        except RecursionError:
            raise ValueError(f"{printable(path)}, line {number}: nested too deep") from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{printable(path)}, line {number + 1}: "
                f"{_NO_TRACE if number == 0 else 'not text'}; it is not UTF-8 ({error.reason})"
            ) from None
        except ValueError as error:  # of json, ours
            raise ValueError(f"{printable(path)}, line {max(number, 1)}: {error}") from None
    if number == 0:
        raise ValueError(f"{printable(path)}: empty; a trace has at least a header")
    return reader.trace


_NO_TRACE = (
    "this is not a trace of accesses: its first line is not a header; "
    "torch_uvm.tools.record_accesses(path) writes traces"
)


class _Reader:
    def __init__(self) -> None:
        self.trace = Trace()
        self.live: set[int] = set()

    def line(self, text: str, *, first: bool) -> None:
        try:
            record = json.loads(text)
        except ValueError as error:
            what = _NO_TRACE if first else f"not a record: {error}"
            raise ValueError(f"{what}; the line begins with {excerpt(text[:40])}") from None
        if first and (not isinstance(record, dict) or next(iter(record), None) != "format"):
            raise ValueError(f"{_NO_TRACE}; the line is {excerpt(record)}")
        if not isinstance(record, dict) or not record:
            raise ValueError(f"expected an object, got {excerpt(record)}")
        kind = next(iter(record))
        if first:
            self._format(record)
            return
        handler = self._HANDLERS.get(kind)
        if handler is None:
            raise ValueError(f"unknown record {excerpt(kind)}; known: {', '.join(self._HANDLERS)}")
        keys, handle = handler
        if record.keys() != keys:
            raise ValueError(f"{kind} has {excerpt(list(record))}; expected {', '.join(sorted(keys))}")
        handle(self, record)

    def _format(self, record: dict[str, Any]) -> None:
        if record["format"] != FORMAT:
            raise ValueError(f"the format is {excerpt(record['format'])}; expected {FORMAT!r}")
        if record.get("version") not in READ_VERSIONS or isinstance(record["version"], bool):
            listed = " and ".join(map(str, READ_VERSIONS))
            raise ValueError(f"version {excerpt(record.get('version'))}; this reads {listed}")
        units = {"time": "us", "size": "bytes"}
        if record.get("units") != units:
            raise ValueError(f"units {excerpt(record.get('units'))}; expected {units}")
        budgets = record.get("budgets")
        if not isinstance(budgets, list) or len(budgets) > _MOST_DEVICES:
            raise ValueError(f"budgets {excerpt(budgets)}; expected a list of bytes or null")
        self.trace.budgets = tuple(None if it is None else _count(it, "a budget") for it in budgets)

    def _add(self, number: int, record: dict[str, Any], resident: bool) -> None:
        device = _count(record["device"], "device", _MOST_DEVICES - 1)
        self.trace.storages[number] = Storage(device, _count(record["bytes"], "bytes"), resident)
        self.live.add(number)

    def _storage(self, record: dict[str, Any]) -> None:
        number = _name(record["storage"])
        resident = _flag(record["resident"], "resident")
        if number in self.live:  # mentioned twice; the first time counts
            return
        self._add(number, record, resident)

    def _operator(self, record: dict[str, Any]) -> None:
        name = record["operator"]
        if not isinstance(name, str):
            raise ValueError(f"operator {excerpt(name)}; expected its name")
        time = _time(record["time"])
        if self.trace.operators and time < self.trace.operators[-1].time_us:
            raise ValueError(
                f"time {time} is before the operator before it, {self.trace.operators[-1].time_us}"
            )
        self.trace.operators.append(
            Operator(
                name,
                time,
                _flag(record["in_place_ok"], "in_place_ok"),
                tuple(self._live(it) for it in _list(record["reads"], "reads")),
                tuple(self._live(it) for it in _list(record["writes"], "writes")),
            )
        )

    def _live(self, value: object) -> int:
        number = _name(value)
        if number not in self.live:
            raise ValueError(f"storage {number} is unknown, or was freed")
        return number

    def _birth(self, record: dict[str, Any]) -> None:
        number = _name(record["birth"])
        if number in self.trace.storages:
            raise ValueError(f"storage {number} is created a second time")
        self._add(number, record, True)
        if self.trace.operators:
            self.trace.operators[-1].births.append(number)

    def _death(self, record: dict[str, Any]) -> None:
        number = _name(record["death"])
        if number not in self.live:  # no operator has used it
            return
        self.live.remove(number)
        if self.trace.operators:
            self.trace.operators[-1].deaths.append(number)

    def _workspace(self, record: dict[str, Any]) -> None:
        if not self.trace.operators:
            raise ValueError("a workspace before the first operator")
        latest = self.trace.operators[-1]
        self.trace.operators[-1] = replace(latest, workspace=_count(record["workspace"], "workspace"))

    def _transfer(self, record: dict[str, Any]) -> None:
        kind = record["transfer"]
        if kind not in TRANSFERS:
            raise ValueError(f"transfer {excerpt(kind)}; accepted: {', '.join(TRANSFERS)}")
        number = _name(record["storage"])
        if number not in self.trace.storages:
            raise ValueError(f"storage {number} is unknown")
        count = _count(record["bytes"], "bytes")
        operators = len(self.trace.operators)
        self.trace.transfers.append(Transfer(kind, number, count, _time(record["time"]), operators))

    def _took(self, record: dict[str, Any]) -> None:
        number = _count(record["took"], "took", 2**64 - 1)
        if number >= len(self.trace.transfers):
            raise ValueError(f"transfer {number} is unknown; there are {len(self.trace.transfers)}")
        took = _time(record["us"])
        self.trace.transfers[number] = replace(self.trace.transfers[number], took_us=took)

    def _ran(self, record: dict[str, Any]) -> None:
        begun = len(self.trace.operators)
        first = _count(record["ran"], "ran", begun)
        last = self.trace.groups[-1] if self.trace.groups else OperatorGroup(0, 0, 0)
        if first < last.first + last.operators:
            raise ValueError(f"operator {first} is timed already")
        operators = _count(record["operators"], "operators")
        if not 0 < operators <= begun - first:
            raise ValueError(f"{operators} operators from number {first}; {begun} have begun")
        self.trace.groups.append(OperatorGroup(first, operators, _time(record["us"])))

    def _held(self, record: dict[str, Any]) -> None:
        _time(record["held"])
        self.trace.holds.append(len(self.trace.operators))

    def _resident(self, record: dict[str, Any]) -> None:
        count = _count(record["resident"], "resident")
        device = _count(record["device"], "device", _MOST_DEVICES - 1)
        self.trace.resident.append(Resident(device, count, len(self.trace.operators)))

    def _step(self, record: dict[str, Any]) -> None:
        if record["step"] != "end":
            raise ValueError(f"step {excerpt(record['step'])}; expected 'end'")
        self.trace.steps.append(len(self.trace.operators))

    _HANDLERS: dict[str, tuple[set[str], Callable[[_Reader, dict[str, Any]], None]]] = {
        "storage": ({"storage", "device", "bytes", "resident"}, _storage),
        "operator": ({"operator", "time", "in_place_ok", "reads", "writes"}, _operator),
        "birth": ({"birth", "device", "bytes"}, _birth),
        "death": ({"death"}, _death),
        "workspace": ({"workspace"}, _workspace),
        "transfer": ({"transfer", "storage", "bytes", "time"}, _transfer),
        "took": ({"took", "us"}, _took),
        "ran": ({"ran", "operators", "us"}, _ran),
        "held": ({"held"}, _held),
        "resident": ({"resident", "device"}, _resident),
        "step": ({"step"}, _step),
    }


def _count(value: object, what: str, most: int = _MOST_BYTES) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{what} {excerpt(value)}; expected a whole number from 0 to {most}")
    return value


def _name(value: object) -> int:
    return _count(value, "storage", 2**64 - 1)


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"time {excerpt(value)}; expected microseconds from 0 on")
    return float(value)


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} {excerpt(value)}; expected true or false")
    return value


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{what} {excerpt(value)}; expected a list")
    return value
