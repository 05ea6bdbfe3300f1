"""Reads and checks logs of allocations: those of `record_allocations`, and RMM's (docs/annex.md).

A log may come from an untrusted source: a row that does not fit raises an error with its line number.
Pointers become numbers of allocations.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch_uvm._util.escaping import excerpt, printable

HEADER = "Thread,Time,Action,Pointer,Size,Stream"
ALLOCATE, FREE, FAILURE = "allocate", "free", "allocate failure"
ACTIONS = (ALLOCATE, FREE, FAILURE)

#: The most rows of a file. They are kept in memory, about 40 bytes each.
MOST_ROWS = 1 << 24
_LONGEST_LINE = 400
_MOST_BYTES = 2**63 - 1
_DAY_US = 24 * 3600 * 10**6

_COUNT = re.compile(r"[0-9]{1,20}", re.ASCII)
_TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])[.:]([0-9]{6})", re.ASCII)
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F]{1,16}", re.ASCII)
_NULL = ("(nil)", "0x0", "0")


class Event(NamedTuple):
    """A row with a known allocation."""

    thread: int
    time_us: int  #: since the first midnight of the log
    action: str  #: one of ACTIONS
    allocation: int  #: its number, from 0 in the order of the log; -1 of a failure
    bytes: int
    stream: int  #: as it was logged
    line: int  #: of the file, from 1


class AllocationLog:
    """The events of a log in columns, one entry for each, in the order of the file.

    `kinds` are indices of ACTIONS, `streams` of `logged_streams`. Rows without bytes, and frees of what was
    allocated before the log began, are not events.
    """

    def __init__(self) -> None:
        self.threads = array("Q")
        self.times_us = array("Q")
        self.kinds = array("B")
        self.allocations = array("I")
        self.bytes = array("Q")
        self.streams = array("I")
        self.lines = array("I")
        self.logged_streams: list[int] = []
        self.allocation_count = 0
        self.never_freed: list[int] = []  # allocations, by number
        self.skipped_frees = 0
        self.skipped_bytes = 0
        self.failures = 0

    def __len__(self) -> int:
        return len(self.kinds)

    def __iter__(self) -> Iterator[Event]:
        for at, kind in enumerate(self.kinds):
            yield Event(
                self.threads[at],
                self.times_us[at],
                ACTIONS[kind],
                self.allocations[at] if kind != 2 else -1,
                self.bytes[at],
                self.logged_streams[self.streams[at]],
                self.lines[at],
            )

    def devices(self) -> list[int]:
        """The devices that the log has allocations of; -1 is the host."""
        return sorted({self.device_of(it) for it in self.logged_streams})

    def peak_live_bytes(self, device: int | None = None) -> int:
        """The most bytes live at once, on one device (-1: the host) or on all together."""
        counted: set[int] = set()
        live = peak = 0
        for at, kind in enumerate(self.kinds):
            number = self.allocations[at]
            if kind == 0 and (
                device is None or self.device_of(self.logged_streams[self.streams[at]]) == device
            ):
                counted.add(number)
                live += self.bytes[at]
                peak = max(peak, live)
            elif kind == 1 and number in counted:  # on whatever stream
                live -= self.bytes[at]
        return peak

    @staticmethod
    def device_of(logged_stream: int) -> int:
        """The device of a logged stream; -1 is the host."""
        device = logged_stream >> 48
        return -1 if device == 0xFFFF else device


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
        ValueError: it is not a log, has more than 16 777 216 rows, or a row does not fit; the message has
            the line's number.
    """
    size = path.stat().st_size
    reader = _Reader()
    number = done = 0
    with path.open("rb") as file:
        try:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                done += len(line)
                if not line.endswith(b"\n"):
                    raise ValueError(
                        f"longer than {_LONGEST_LINE} bytes"
                        if len(line) == _LONGEST_LINE
                        else "the last line is cut off; was the recording stopped?"
                    )
                if number > MOST_ROWS + 1:
                    raise ValueError(f"more than {MOST_ROWS} rows")
                text = line.decode("ascii").rstrip("\r\n")
                if number == 1:
                    if text != HEADER:
                        raise ValueError(f"the header is {excerpt(text)}; expected {HEADER}")
                else:
                    reader.row(text, number)
                if progress is not None and number % 4096 == 0:
                    progress(done, size)
        except ValueError as error:  # of an encoding, too
            raise ValueError(f"{printable(path)}, line {number}: {error}") from None
    if number == 0:
        raise ValueError(f"{printable(path)}: empty; a log has at least a header")
    return reader.finished()


class _Live(NamedTuple):
    allocation: int  # -1 if it has no bytes
    bytes: int
    line: int


class _Reader:
    def __init__(self) -> None:
        self.log = AllocationLog()
        self.live: dict[int, _Live] = {}
        self.freed: dict[int, int] = {}  # line, by address, until the address is allocated again
        self.streams: dict[str, int] = {}
        self.days_us = 0
        self.latest_us = 0

    def row(self, text: str, line: int) -> None:
        fields = text.split(",")
        if len(fields) != 6:
            raise ValueError(f"{len(fields)} fields in {excerpt(text)}; expected 6")
        thread = _count(fields[0], "thread", 2**64 - 1)
        time_us = self._time(fields[1])
        action = fields[2]
        if action not in ACTIONS:
            raise ValueError(f"action {excerpt(action)}; accepted: {', '.join(ACTIONS)}")
        pointer = _address(fields[3], "pointer")
        count = _count(fields[4], "size", _MOST_BYTES)
        stream = self._stream(fields[5])
        if action == FAILURE:
            self.log.failures += 1
            self._add(thread, time_us, 2, 0, count, stream, line)
            return
        if pointer == 0:
            if count != 0:
                raise ValueError(f"{action} of {count} bytes at no address")
            return
        if pointer + count > 2**64:
            raise ValueError(f"{count} bytes at {fields[3]} do not fit the address space")
        if action == ALLOCATE:
            before = self.live.get(pointer)
            if before is not None:
                raise ValueError(
                    f"{fields[3]} is allocated, and not freed since it was in line {before.line}"
                )
            self.freed.pop(pointer, None)
            number = -1
            if count != 0:
                number = self.log.allocation_count
                self.log.allocation_count += 1
                self._add(thread, time_us, 0, number, count, stream, line)
            self.live[pointer] = _Live(number, count, line)
            return
        known = self.live.pop(pointer, None)
        if known is None:
            if pointer in self.freed:
                raise ValueError(f"{fields[3]} is freed, as it was in line {self.freed[pointer]}")
            self.freed[pointer] = line
            self.log.skipped_frees += 1
            self.log.skipped_bytes += count
            return
        if known.bytes != count:
            raise ValueError(
                f"free of {count} bytes; line {known.line} allocated {known.bytes} at {fields[3]}"
            )
        self.freed[pointer] = line
        if known.allocation >= 0:
            self._add(thread, time_us, 1, known.allocation, count, stream, line)

    def finished(self) -> AllocationLog:
        self.log.never_freed = [it.allocation for it in self.live.values() if it.allocation >= 0]
        return self.log

    def _add(
        self, thread: int, time_us: int, kind: int, allocation: int, count: int, stream: int, line: int
    ) -> None:
        log = self.log
        log.threads.append(thread)
        log.times_us.append(time_us)
        log.kinds.append(kind)
        log.allocations.append(allocation)
        log.bytes.append(count)
        log.streams.append(stream)
        log.lines.append(line)

    def _time(self, text: str) -> int:
        found = _TIME.fullmatch(text)
        if found is None:
            raise ValueError(f"time {excerpt(text)}; expected one such as 14:02:08.123456")
        hours, minutes, seconds, microseconds = (int(it) for it in found.groups())
        of_day = ((hours * 60 + minutes) * 60 + seconds) * 10**6 + microseconds
        # Threads may write slightly out of order; a time half a day earlier belongs to the next day.
        if of_day + self.days_us < self.latest_us - _DAY_US // 2:
            self.days_us += _DAY_US
        self.latest_us = max(self.latest_us, of_day + self.days_us)
        return of_day + self.days_us

    def _stream(self, text: str) -> int:
        known = self.streams.get(text)
        if known is None:
            logged = _address(text, "stream")
            if logged not in self.log.logged_streams:
                if len(self.log.logged_streams) == 4096:
                    raise ValueError("more than 4096 streams")
                self.log.logged_streams.append(logged)
            known = self.streams[text] = self.log.logged_streams.index(logged)
        return known


def _count(text: str, what: str, most: int) -> int:
    if _COUNT.fullmatch(text) is None or int(text) > most:
        raise ValueError(f"{what} {excerpt(text)}; expected a whole number from 0 to {most}")
    return int(text)


def _address(text: str, what: str) -> int:
    if text in _NULL:
        return 0
    if _HEX.fullmatch(text) is None:
        raise ValueError(f"{what} {excerpt(text)}; expected (nil) or one such as 0x7f0c3a000000")
    return int(text, 16)
