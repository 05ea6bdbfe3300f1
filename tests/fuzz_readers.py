"""Fuzzer of file readers: logs of allocations, traces of accesses. Each input is read, or refused by
ValueError.

    python tests/fuzz_readers.py [--seconds 60] [--seed 1]

Mutates valid files by bytes and by fields. Any other exception ends the run and keeps the input.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_uvm._tools.access_traces import FORMAT, VERSION, read_trace
from torch_uvm._tools.allocation_logs import HEADER, read_log
from torch_uvm.allocation_iterations import find
from torch_uvm.cli.plot import samples_of

#: Replacement values for fields.
TELLING = [
    b"0", b"1", b"-1", b"", b"(nil)", b"0x0", b"0xffff000000000000", b"18446744073709551615", b"9" * 30,
    b"9" * 5000, b"allocate", b"free", b"allocate failure", b"24:00:00.000000", b"23:59:59.999999", b"nan",
    b"1e400", b"-0.5", b"1e308", b"true", b"null", b"[]", b"{}", b"[" * 3000, b'"\\u0000"', b'"\\ud800"',
    b"\x1b[31m", b"\xff\xfe", b"\x00", "\u202e".encode(),
]  # fmt: skip


def a_log() -> bytes:
    rows = [HEADER]
    for number in range(12):
        at, stream = f"0x7f0c3a{number:06x}", ("0", "0x10", "0xffff000000000000")[number % 3]
        rows.append(f"4711,14:02:08.{number:06},allocate,{at},{1024 << number},{stream}")
        if number % 3:
            rows.append(f"4711,14:02:09.{number:06},free,{at},{1024 << number},{stream}")
    rows.append("4711,14:02:10.000001,allocate failure,(nil),68719476736,0")
    return ("\n".join(rows) + "\n").encode()


def a_trace() -> bytes:
    records: list[dict[str, object]] = [
        {
            "format": FORMAT,
            "version": VERSION,
            "units": {"time": "us", "size": "bytes"},
            "budgets": [1 << 20, None],
        }
    ]
    records += [{"storage": it, "device": it % 2, "bytes": 4096, "resident": it < 2} for it in range(4)]
    for number in range(4):
        records += [
            {
                "operator": "aten::mm",
                "time": 10.5 * number,
                "in_place_ok": False,
                "reads": [0, number],
                "writes": [1],
            },
            {"birth": 10 + number, "device": 0, "bytes": 512},
            {"transfer": "fetch", "storage": 2, "bytes": 4096, "time": 11 * number},
            {"resident": 8192, "device": 0},
            {"death": 10 + number},
        ]
    records.append({"step": "end"})
    return "".join(json.dumps(it) + "\n" for it in records).encode()


def use_log(path: Path) -> None:
    log = read_log(path)
    assert log.peak_live_bytes() >= 0 and len(log.devices()) <= len(log)
    find(log)


def use_trace(path: Path) -> None:
    trace = read_trace(path)
    for device in {it.device for it in trace.storages.values()}:
        samples_of(trace, device)


Target = tuple[Callable[[], bytes], Callable[[Path], None], bytes]
TARGETS: dict[str, Target] = {
    "log": (a_log, use_log, b",\n"),
    "trace": (a_trace, use_trace, b',:{}[]"\n '),
}


def changed(content: bytes, marks: bytes, chance: random.Random) -> bytes:
    """Flips bytes, replaces fields, moves, removes and duplicates lines, and truncates."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        if not data:
            break
        at = chance.randrange(len(data))
        match chance.randrange(6):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.choice(marks)
            case 2:
                begin = max(data.rfind(bytes([it]), 0, at) for it in marks) + 1
                ends = [it for it in (data.find(bytes([mark]), at) for mark in marks) if it >= 0]
                data[begin : min(ends, default=len(data))] = chance.choice(TELLING)
            case 3:
                lines = data.splitlines(keepends=True)
                line = lines.pop(chance.randrange(len(lines)))
                for _ in range(chance.randrange(3)):
                    lines.insert(chance.randint(0, len(lines)), line)
                data = bytearray(b"".join(lines))
            case 4:
                data[at:at] = chance.choice(TELLING)
            case _:
                if chance.random() < 0.2:
                    del data[at:]
    return bytes(data)


def inputs(target: str, seed: int) -> Iterator[bytes]:
    make, _, marks = TARGETS[target]
    chance = random.Random(f"{target} {seed}")
    while True:
        yield changed(make(), marks, chance)


def refused(target: str, content: bytes, path: Path) -> bool:
    """Whether the file is refused. The message must be short and free of terminal control characters."""
    path.write_bytes(content)
    try:
        TARGETS[target][1](path)
    except ValueError as error:
        message = str(error)
        assert message and len(message) < 1000 and message.isprintable(), message[:2000]
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="of each reader")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for target in TARGETS:
            end = time.monotonic() + arguments.seconds
            count = no = 0
            for content in inputs(target, arguments.seed):
                if time.monotonic() >= end:
                    break
                try:
                    no += refused(target, content, Path(folder) / "input")
                except BaseException:
                    kept = Path(f"crash-{target}")
                    kept.write_bytes(content)
                    print(f"{target}, seed {arguments.seed}, input {count}: kept in {kept}", file=sys.stderr)
                    raise
                count += 1
            print(f"{target}: {count} files with seed {arguments.seed}, {no} refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
