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


def _count(value: object, most: int = _MOST_BYTES) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{excerpt(value)}; expected a whole number from 0 to {most}")
    return value


def _device(value: object) -> int:
    return _count(value, _MOST_DEVICES - 1)


def _number(value: object) -> int:
    return _count(value, 2**64 - 1)


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{excerpt(value)}; expected a list")
    return tuple(_number(it) for it in value)


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{excerpt(value)}; expected microseconds from 0 on")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{excerpt(value)}; expected true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{excerpt(value)}; expected text")
    return value


#: By kind, which is a record's first key, its keys with the checks of their values.
_RECORDS: dict[str, dict[str, Callable[[object], Any]]] = {
    "storage": {"storage": _number, "device": _device, "bytes": _count, "resident": _flag},
    "operator": {
        "operator": _text,
        "time": _time,
        "in_place_ok": _flag,
        "reads": _numbers,
        "writes": _numbers,
    },
    "birth": {"birth": _number, "device": _device, "bytes": _count},
    "death": {"death": _number},
    "workspace": {"workspace": _count},
    "transfer": {"transfer": _text, "storage": _number, "bytes": _count, "time": _time},
    "took": {"took": _number, "us": _time},
    "ran": {"ran": _count, "operators": _count, "us": _time},
    "held": {"held": _time},
    "resident": {"resident": _count, "device": _device},
    "step": {"step": _text},
}


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
        if first:
            self._format(record)
            return
        kind = next(iter(record))
        if kind not in _RECORDS:
            raise ValueError(f"unknown record {excerpt(kind)}; known: {', '.join(_RECORDS)}")
        checks = _RECORDS[kind]
        if record.keys() != checks.keys():
            raise ValueError(f"{kind} has {excerpt(list(record))}; expected {', '.join(sorted(checks))}")
        for key, check in checks.items():
            try:
                record[key] = check(record[key])
            except ValueError as error:
                raise ValueError(f"{key} {error}") from None
        handle: Callable[..., None] = getattr(self, f"_{kind}")
        handle(*(record[key] for key in checks))

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
        self.trace.budgets = tuple(None if it is None else _count(it) for it in budgets)

    def _storage(self, number: int, device: int, size: int, resident: bool) -> None:
        if number not in self.live:  # mentioned twice; the first time counts
            self.trace.storages[number] = Storage(device, size, resident)
            self.live.add(number)

    def _operator(
        self, name: str, time: float, in_place_ok: bool, reads: tuple[int, ...], writes: tuple[int, ...]
    ) -> None:
        before = self.trace.operators[-1].time_us if self.trace.operators else 0.0
        if time < before:
            raise ValueError(f"time {time} is before the operator before it, {before}")
        for number in (*reads, *writes):
            if number not in self.live:
                raise ValueError(f"storage {number} is unknown, or was freed")
        self.trace.operators.append(Operator(name, time, in_place_ok, reads, writes))

    def _birth(self, number: int, device: int, size: int) -> None:
        if number in self.trace.storages:
            raise ValueError(f"storage {number} is created a second time")
        self._storage(number, device, size, True)
        if self.trace.operators:
            self.trace.operators[-1].births.append(number)

    def _death(self, number: int) -> None:
        if number not in self.live:  # no operator has used it
            return
        self.live.remove(number)
        if self.trace.operators:
            self.trace.operators[-1].deaths.append(number)

    def _workspace(self, size: int) -> None:
        if not self.trace.operators:
            raise ValueError("a workspace before the first operator")
        self.trace.operators[-1] = replace(self.trace.operators[-1], workspace=size)

    def _transfer(self, kind: str, number: int, size: int, time: float) -> None:
        if kind not in TRANSFERS:
            raise ValueError(f"transfer {excerpt(kind)}; accepted: {', '.join(TRANSFERS)}")
        if number not in self.trace.storages:
            raise ValueError(f"storage {number} is unknown")
        self.trace.transfers.append(Transfer(kind, number, size, time, len(self.trace.operators)))

    def _took(self, number: int, us: float) -> None:
        if number >= len(self.trace.transfers):
            raise ValueError(f"transfer {number} is unknown; there are {len(self.trace.transfers)}")
        self.trace.transfers[number] = replace(self.trace.transfers[number], took_us=us)

    def _ran(self, first: int, operators: int, us: float) -> None:
        begun = len(self.trace.operators)
        last = self.trace.groups[-1] if self.trace.groups else OperatorGroup(0, 0, 0)
        if first < last.first + last.operators:
            raise ValueError(f"operator {first} is timed already")
        if not 0 < operators <= begun - first:
            raise ValueError(f"{operators} operators from number {first}; {begun} have begun")
        self.trace.groups.append(OperatorGroup(first, operators, us))

    def _held(self, us: float) -> None:
        self.trace.holds.append(len(self.trace.operators))

    def _resident(self, size: int, device: int) -> None:
        self.trace.resident.append(Resident(device, size, len(self.trace.operators)))

    def _step(self, end: str) -> None:
        if end != "end":
            raise ValueError(f"step {excerpt(end)}; expected 'end'")
        self.trace.steps.append(len(self.trace.operators))
