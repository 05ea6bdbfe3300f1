"""Reads and checks traces of accesses: what `torch_uvm.traces` exports, and describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch_uvm._tools.text_lines import read_lines
from torch_uvm._util.escaping import excerpt

FORMAT = "torch_uvm accesses"
VERSION = 5
#: Version 1 has no `took`, version 2 no `ran`, version 3 no `workspace`, version 4 no `held`.
READ_VERSIONS = (1, 2, 3, 4, VERSION)
UNITS = {"time": "us", "size": "bytes"}
TRANSFERS = ("fetch", "write_back", "drop", "in_place")

_LONGEST_LINE = 64 << 20  # bytes; about 20 for each operand of an operator
_MOST_LINES = 1 << 24  # all lines are kept in memory, about 500 bytes each
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
    read_lines(path, reader.line, _LONGEST_LINE, progress)
    return reader.trace


_NO_TRACE = (
    "this is not a trace of accesses: its first line is not a header; "
    "torch_uvm.tools.record_accesses(path) writes traces"
)

#: Whether a value of JSON fits, and what would.
_Check: TypeAlias = tuple[Callable[[Any], bool], str]


def _whole(most: int) -> _Check:
    return lambda it: type(it) is int and 0 <= it <= most, f"a whole number from 0 to {most}"


_BYTES = _COUNT = _whole(2**63 - 1)
_DEVICE = _whole(_MOST_DEVICES - 1)
_NUMBER = _whole(2**64 - 1)
_NUMBERS: _Check = (lambda it: type(it) is list and all(map(_NUMBER[0], it)), "a list of whole numbers")
_TIME: _Check = (lambda it: type(it) in (int, float) and 0 <= it < 1e18, "microseconds from 0 on")
_FLAG: _Check = (lambda it: type(it) is bool, "true or false")
_TEXT: _Check = (lambda it: type(it) is str, "text")

#: By kind, which is a record's first key, its keys with the checks of their values.
_RECORDS: dict[str, dict[str, _Check]] = {
    "storage": {"storage": _NUMBER, "device": _DEVICE, "bytes": _BYTES, "resident": _FLAG},
    "operator": {
        "operator": _TEXT,
        "time": _TIME,
        "in_place_ok": _FLAG,
        "reads": _NUMBERS,
        "writes": _NUMBERS,
    },
    "birth": {"birth": _NUMBER, "device": _DEVICE, "bytes": _BYTES},
    "death": {"death": _NUMBER},
    "workspace": {"workspace": _BYTES},
    "transfer": {"transfer": _TEXT, "storage": _NUMBER, "bytes": _BYTES, "time": _TIME},
    "took": {"took": _NUMBER, "us": _TIME},
    "ran": {"ran": _COUNT, "operators": _COUNT, "us": _TIME},
    "held": {"held": _TIME},
    "resident": {"resident": _BYTES, "device": _DEVICE},
    "step": {"step": _TEXT},
}


class _Reader:
    def __init__(self) -> None:
        self.trace = Trace()
        self.live: set[int] = set()

    def line(self, line: bytes, number: int) -> None:
        if number > _MOST_LINES:
            raise ValueError(f"more than {_MOST_LINES} lines")
        first = number == 1
        try:
            record = json.loads(line.decode())
        except ValueError as error:
            what = _NO_TRACE if first else "not a record"
            raise ValueError(f"{what}: {error}; the line begins with {excerpt(line[:40])}") from None
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
        for key, (fits, expected) in checks.items():
            if not fits(record[key]):
                raise ValueError(f"{key} {excerpt(record[key])}; expected {expected}")
        handle: Callable[..., None] = getattr(self, f"_{kind}")
        handle(*(record[key] for key in checks))

    def _format(self, record: dict[str, Any]) -> None:
        if record["format"] != FORMAT:
            raise ValueError(f"the format is {excerpt(record['format'])}; expected {FORMAT!r}")
        version, units, budgets = (record.get(key) for key in ("version", "units", "budgets"))
        if type(version) is not int or version not in READ_VERSIONS:
            listed = " and ".join(map(str, READ_VERSIONS))
            raise ValueError(f"version {excerpt(version)}; this reads {listed}")
        if units != UNITS:
            raise ValueError(f"units {excerpt(units)}; expected {UNITS}")
        if not (
            isinstance(budgets, list)
            and len(budgets) <= _MOST_DEVICES
            and all(it is None or _BYTES[0](it) for it in budgets)
        ):
            raise ValueError(f"budgets {excerpt(budgets)}; expected a list of bytes or null")
        self.trace.budgets = tuple(budgets)

    def _storage(self, number: int, device: int, size: int, resident: bool) -> None:
        if number not in self.live:  # mentioned twice; the first time counts
            self.trace.storages[number] = Storage(device, size, resident)
            self.live.add(number)

    def _operator(
        self, name: str, time: float, in_place_ok: bool, reads: list[int], writes: list[int]
    ) -> None:
        before = self.trace.operators[-1].time_us if self.trace.operators else 0.0
        if time < before:
            raise ValueError(f"time {time} is before the operator before it, {before}")
        for number in (*reads, *writes):
            if number not in self.live:
                raise ValueError(f"storage {number} is unknown, or was freed")
        self.trace.operators.append(Operator(name, float(time), in_place_ok, tuple(reads), tuple(writes)))

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
        self.trace.transfers.append(Transfer(kind, number, size, float(time), len(self.trace.operators)))

    def _took(self, number: int, us: float) -> None:
        if number >= len(self.trace.transfers):
            raise ValueError(f"transfer {number} is unknown; there are {len(self.trace.transfers)}")
        self.trace.transfers[number] = replace(self.trace.transfers[number], took_us=float(us))

    def _ran(self, first: int, operators: int, us: float) -> None:
        begun = len(self.trace.operators)
        last = self.trace.groups[-1] if self.trace.groups else OperatorGroup(0, 0, 0)
        if first < last.first + last.operators:
            raise ValueError(f"operator {first} is timed already")
        if not 0 < operators <= begun - first:
            raise ValueError(f"{operators} operators from number {first}; {begun} have begun")
        self.trace.groups.append(OperatorGroup(first, operators, float(us)))

    def _held(self, us: float) -> None:
        self.trace.holds.append(len(self.trace.operators))

    def _resident(self, size: int, device: int) -> None:
        self.trace.resident.append(Resident(device, size, len(self.trace.operators)))

    def _step(self, end: str) -> None:
        if end != "end":
            raise ValueError(f"step {excerpt(end)}; expected 'end'")
        self.trace.steps.append(len(self.trace.operators))
