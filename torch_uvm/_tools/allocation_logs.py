"""Reads and checks logs of allocations: what `torch_uvm.allocation_logs` exports, and describes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from torch_uvm._tools.text_lines import read_lines
from torch_uvm._util.escaping import excerpt

HEADER = "Thread,Time,Action,Pointer,Size,Stream"
ALLOCATE, FREE, FAILURE = "allocate", "free", "allocate failure"
ACTIONS = (ALLOCATE, FREE, FAILURE)

#: The most rows of a file. They are kept in memory, about 200 bytes each.
MOST_ROWS = 1 << 22
_LONGEST_LINE = 400
_MOST_BYTES = 2**63 - 1

_COUNT = re.compile(r"[0-9]{1,20}", re.ASCII)
_TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])[.:]([0-9]{6})", re.ASCII)
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F]{1,16}", re.ASCII)


class Event(NamedTuple):
    """A row with a known allocation."""

    thread: int
    time_us: int  #: since midnight
    action: str  #: one of ACTIONS
    allocation: int  #: its number, from 0 in the order of the log; -1 of a failure
    bytes: int
    stream: int  #: as it was logged
    line: int  #: of the file, from 1

    @property
    def device(self) -> int:
        """-1 is the host."""
        device = self.stream >> 48
        return -1 if device == 0xFFFF else device


class AllocationLog(list[Event]):
    """The events of a log, in the order of the file.

    Rows without bytes, and frees of what was allocated before the log began, are not events.
    """

    allocation_count = 0
    failures = 0
    skipped_frees = 0
    skipped_bytes = 0
    never_freed: tuple[int, ...] = ()  #: allocations, by number

    def devices(self) -> list[int]:
        """The devices that the log has events of; -1 is the host."""
        return sorted({event.device for event in self})

    def live_bytes(self) -> list[int]:
        """The bytes that are live after each event."""
        signs = {ALLOCATE: 1, FREE: -1, FAILURE: 0}
        return list(accumulate(signs[event.action] * event.bytes for event in self))

    def peak_live_bytes(self) -> int:
        """The most bytes live at once, on all devices together."""
        return max(self.live_bytes(), default=0)


def read_log(path: Path, progress: Callable[[int, int], object] | None = None) -> AllocationLog:
    """Reads and checks a log.

    A free is matched to the latest allocation at its address. A free without one, at an address that was not
    freed before, is of an allocation older than the log; it is counted and skipped. Allocations that are
    never freed are listed.

    Args:
        path: the file.
        progress: called from time to time with the bytes read and the size of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a log, has more than 4 194 304 rows, or a row does not fit; the message has
            the line's number.
    """
    reader = _Reader()
    read_lines(path, reader.line, _LONGEST_LINE, progress)
    reader.log.never_freed = tuple(it.allocation for it in reader.live.values() if it.bytes)
    return reader.log


class _Reader:
    def __init__(self) -> None:
        self.log = AllocationLog()
        self.live: dict[int, Event] = {}
        self.freed: dict[int, int] = {}  # line, by address, until the address is allocated again

    def line(self, given: bytes, line: int) -> None:
        text = given.decode("ascii").rstrip("\r\n")
        if line == 1:
            if text != HEADER:
                raise ValueError(f"the header is {excerpt(text)}; expected {HEADER}")
            return
        if line > MOST_ROWS + 1:
            raise ValueError(f"more than {MOST_ROWS} rows")
        fields = text.split(",")
        if len(fields) != 6:
            raise ValueError(f"{len(fields)} fields in {excerpt(text)}; expected 6")
        thread = _count(fields[0], "thread", 2**64 - 1)
        time_us = _time(fields[1])
        action, address = fields[2], fields[3]
        if action not in ACTIONS:
            raise ValueError(f"action {excerpt(action)}; accepted: {', '.join(ACTIONS)}")
        pointer = _address(address, "pointer")
        count = _count(fields[4], "size", _MOST_BYTES)
        event = Event(thread, time_us, action, -1, count, _address(fields[5], "stream"), line)
        if action == FAILURE:
            self.log.failures += 1
            self.log.append(event)
        elif pointer == 0:
            if count != 0:
                raise ValueError(f"{action} of {count} bytes at no address")
        elif pointer + count > 2**64:
            raise ValueError(f"{count} bytes at {address} do not fit the address space")
        elif action == ALLOCATE:
            self._allocate(pointer, address, event)
        else:
            self._free(pointer, address, event)

    def _allocate(self, pointer: int, address: str, event: Event) -> None:
        if pointer in self.live:
            line = self.live[pointer].line
            raise ValueError(f"{address} is allocated, and not freed since it was in line {line}")
        self.freed.pop(pointer, None)
        if event.bytes:
            event = event._replace(allocation=self.log.allocation_count)
            self.log.allocation_count += 1
            self.log.append(event)
        self.live[pointer] = event

    def _free(self, pointer: int, address: str, event: Event) -> None:
        known = self.live.pop(pointer, None)
        if known is None and pointer in self.freed:
            raise ValueError(f"{address} is freed, as it was in line {self.freed[pointer]}")
        self.freed[pointer] = event.line
        if known is None:
            self.log.skipped_frees += 1
            self.log.skipped_bytes += event.bytes
            return
        if known.bytes != event.bytes:
            raise ValueError(
                f"free of {event.bytes} bytes; line {known.line} allocated {known.bytes} at {address}"
            )
        if event.bytes:
            self.log.append(event._replace(allocation=known.allocation))


def _time(text: str) -> int:
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"time {excerpt(text)}; expected one such as 14:02:08.123456")
    hours, minutes, seconds, microseconds = (int(it) for it in found.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * 10**6 + microseconds


def _count(text: str, what: str, most: int) -> int:
    if _COUNT.fullmatch(text) is None or int(text) > most:
        raise ValueError(f"{what} {excerpt(text)}; expected a whole number from 0 to {most}")
    return int(text)


def _address(text: str, what: str) -> int:
    if text == "(nil)":
        return 0
    if _HEX.fullmatch(text) is None:
        raise ValueError(f"{what} {excerpt(text)}; expected (nil) or one such as 0x7f0c3a000000")
    return int(text, 16)
