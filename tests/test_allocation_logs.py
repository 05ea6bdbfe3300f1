"""Logs of allocations: recording, reading and errors."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from _spawn import Spawn
from _threads import in_threads

import torch_uvm
from torch_uvm._tools.allocation_logs import ACTIONS, HEADER, read_log

HERE = torch.accelerator.current_accelerator()

#: RMM's format (logging_resource_adaptor), with the time formats of its current and its earlier versions.
RMM = """Thread,Time,Action,Pointer,Size,Stream
2342727,15:47:02.841961,allocate,0x10012400000,1048576,0
2342727,15:47:02.841977,allocate,0x10012500000,256,0x2
2342731,15:47:02.842000,allocate failure,(nil),68719476736,0x0
2342731,15:47:02.842001,allocate,(nil),0,0
2342727,15:47:03:000001,free,0x10012500000,256,0x2
2342727,15:47:03.000002,free,0x10012400000,1048576,0
"""


def _write(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text("".join(f"{line}\n" for line in [header, *rows]))
    return path


def _prefix(text: str, base: int) -> int:
    """Reads a number like std::stoull: as many digits as there are."""
    text = text.strip()
    if base == 16 and text[:2].lower() == "0x":
        text = text[2:]
    digits = ""
    for character in text:
        if not character.isascii() or not character.isalnum() or int(character, 36) >= base:
            break
        digits += character
    return int(digits, base)  # raises without digits, too


def as_rmm_reads(path: Path) -> list[tuple[int, str, int, int, int]]:
    """RMM's parse_csv (cpp/benchmarks/utilities/log_parser.hpp), reimplemented without our reader.

    Returns:
        thread, action, pointer, size, stream of each row
    """
    lines = path.read_text().split("\n")
    assert lines.pop() == ""  # the file ends with a newline
    columns = {name: index for index, name in enumerate(lines[0].split(","))}
    events = []
    for line in lines[1:]:
        cells = line.split(",")
        assert len(cells) == len(columns)
        action, pointer = cells[columns["Action"]], cells[columns["Pointer"]]
        assert action in ("allocate", "allocate failure", "free")
        events.append(
            (
                _prefix(cells[columns["Thread"]], 10),
                action,
                0 if pointer == "(nil)" else _prefix(pointer, 16),
                _prefix(cells[columns["Size"]], 10),
                _prefix(cells[columns["Stream"]], 10),
            )
        )
    return events


@pytest.fixture
def on() -> Iterator[torch.device]:
    """Managed memory on, without the residency engine."""
    assert HERE is not None
    torch_uvm.enable(budget=None)
    yield HERE
    torch_uvm.disable()


class TestRecord:
    def test_rows_agree_with_the_statistics(self, on: torch.device, tmp_path: Path) -> None:
        keys = [
            f"{kind}.all.{what}"
            for kind in ("allocation", "requested_bytes")
            for what in ("allocated", "freed")
        ]
        before = torch_uvm.memory.memory_stats()
        with torch_uvm.tools.record_allocations(tmp_path / "log.csv") as recording:
            held = [torch.ones(size, device=on) for size in (100, 5000, 70, 1_000_000)]
            (held[1] * 2).sum().item()
            host = torch_uvm.memory.zeros(1000, device="cpu")
            del held[2]
        after = torch_uvm.memory.memory_stats()
        change = {key: after[key] - before[key] for key in keys}
        log = read_log(tmp_path / "log.csv")
        sums = {action: [it for it in log if it.action == action] for action in ACTIONS}
        assert change == {
            "allocation.all.allocated": len(sums["allocate"]),
            "allocation.all.freed": len(sums["free"]) + log.skipped_frees,
            "requested_bytes.all.allocated": sum(it.bytes for it in sums["allocate"]),
            "requested_bytes.all.freed": sum(it.bytes for it in sums["free"]) + log.skipped_bytes,
        }
        assert sums["allocate"][0].bytes == 400 and sums["allocate failure"] == []
        assert len(log.never_freed) == 4  # three of the list, and one of the host
        assert recording.rows == len(log) + log.skipped_frees
        assert {it.device for it in sums["allocate"]} == {0, -1}
        assert host.numel() == 1000

    def test_rmm_reads_it(self, on: torch.device, tmp_path: Path) -> None:
        other = torch.Stream(on)
        with torch_uvm.tools.record_allocations(tmp_path / "log.csv"):
            x = torch.ones(100, device=on)
            with other:
                y = torch.ones(200, device=on)
            del x, y
            z = torch_uvm.memory.ones(300, device="cpu")
        theirs = as_rmm_reads(tmp_path / "log.csv")
        ours = list(read_log(tmp_path / "log.csv"))
        assert [(it.thread, it.action, it.bytes) for it in ours] == [
            (thread, action, size) for thread, action, _, size, _ in theirs
        ]
        assert {it[4] for it in theirs} == {0}  # default streams only, which RMM's replay requires
        assert len({it.stream for it in ours}) == 3
        live: dict[int, int] = {}
        for _, action, pointer, size, _ in theirs:
            assert (live.pop(pointer) == size) if action == "free" else live.setdefault(pointer, size) == size
        assert list(live.values()) == [z.nbytes]

    def test_rows_of_several_threads_are_in_a_possible_order(self, on: torch.device, tmp_path: Path) -> None:
        def work(seed: int) -> None:
            sizes = random.Random(seed)
            for _ in range(200):
                torch.empty(sizes.randrange(1, 5000), device=on)

        with torch_uvm.tools.record_allocations(tmp_path / "log.csv"):
            in_threads(*(partial(work, seed) for seed in range(4)))
        log = read_log(tmp_path / "log.csv")  # raises for blocks that are allocated or freed twice
        assert len({it.thread for it in log}) == 4 and len(log) == 4 * 200 * 2
        assert log.never_freed == () and log.skipped_frees == 0
        times = [it.time_us for it in log]
        assert times == sorted(times)

    def test_a_failure_is_a_row(self, on: torch.device, tmp_path: Path) -> None:
        torch_uvm.set_limit(torch_uvm.memory.memory_reserved() + (1 << 20))
        with torch_uvm.tools.record_allocations(tmp_path / "log.csv"), pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 30, dtype=torch.uint8, device=on)
        (event,) = read_log(tmp_path / "log.csv")
        assert (event.action, event.bytes, event.allocation) == ("allocate failure", 1 << 30, -1)

    def test_nothing_is_recorded_before_and_after(self, on: torch.device, tmp_path: Path) -> None:
        before = torch.ones(10, device=on)
        recording = torch_uvm.tools.record_allocations(str(tmp_path / "log.csv"))
        del before
        recording.stop()
        recording.stop()  # a second stop does nothing
        after = torch.ones(10, device=on)
        log = read_log(tmp_path / "log.csv")
        assert (len(log), log.skipped_frees, log.skipped_bytes) == (0, 1, 40)
        assert after.numel() == 10 and recording.rows == 1

    def test_one_at_a_time(self, on: torch.device, tmp_path: Path) -> None:
        with torch_uvm.tools.record_allocations(tmp_path / "first.csv"):
            with pytest.raises(RuntimeError, match=r"first\.csv.*one recording at a time"):
                torch_uvm.tools.record_allocations(tmp_path / "second.csv")
        assert not (tmp_path / "second.csv").exists()
        torch_uvm.tools.record_allocations(tmp_path / "second.csv").stop()

    def test_bad_paths(self, tmp_path: Path) -> None:
        nowhere = tmp_path / "nowhere"
        nowhere.symlink_to(tmp_path / "none" / "log.csv")
        with pytest.raises(TypeError, match="path is 7"):
            torch_uvm.tools.record_allocations(7)  # type: ignore[arg-type]
        with pytest.raises(IsADirectoryError, match="is a folder"):
            torch_uvm.tools.record_allocations(tmp_path)
        with pytest.raises(FileNotFoundError, match="no folder"):
            torch_uvm.tools.record_allocations(tmp_path / "none" / "log.csv")
        with pytest.raises(ValueError, match="cannot write"):
            torch_uvm.tools.record_allocations(nowhere)
        # The previous calls left no recording active.
        torch_uvm.tools.record_allocations(tmp_path / "log.csv").stop()

    def test_a_full_disk_is_reported_at_the_end(self, on: torch.device) -> None:
        recording = torch_uvm.tools.record_allocations("/dev/full")
        x = torch.ones(100, device=on)
        with pytest.raises(RuntimeError, match=r"/dev/full.* 1 rows are missing: No space left"):
            recording.stop()
        assert x.sum().item() == 100 and recording.rows == 0

    def test_exit_completes_it_and_children_do_not_write_to_it(self, spawn: Spawn) -> None:
        spawn(
            """
            import os, torch, torch_uvm
            device = torch.accelerator.current_accelerator()
            torch_uvm.enable(budget=None)
            torch_uvm.tools.record_allocations("log.csv")
            x = torch.ones(100, device=device)
            if os.fork() == 0:
                del x
                raise SystemExit(0)  # the exit handlers run
            assert os.wait()[1] == 0
            y = torch.ones(7, device=device)
            """,
            env={"TORCH_UVM_DEVICE": "emu"},
        )
        log = read_log(spawn.folder / "log.csv")
        assert [it.bytes for it in log if it.action == "allocate"] == [400, 28]

    def test_fetches_of_the_engine_are_recorded(self, on: torch.device, tmp_path: Path) -> None:
        torch_uvm.enable(budget="16MiB")
        with torch_uvm.tools.record_allocations(tmp_path / "log.csv"):
            tensors = [torch.ones(1 << 20, device=on) for _ in range(8)]  # 4 MiB each
            for x in tensors:
                x.add_(1)
            del tensors, x
        log = read_log(tmp_path / "log.csv")
        assert log.allocation_count > 8  # some were evicted and fetched into new blocks
        assert log.never_freed == () and log.skipped_frees == 0


class TestRead:
    def test_rmm_logs(self, tmp_path: Path) -> None:
        path = tmp_path / "rmm.csv"
        path.write_text(RMM)
        log = read_log(path)
        assert [(it.thread, it.action, it.allocation, it.bytes, it.stream, it.line) for it in log] == [
            (2342727, "allocate", 0, 1 << 20, 0, 2),
            (2342727, "allocate", 1, 256, 2, 3),
            (2342731, "allocate failure", -1, 64 << 30, 0, 4),
            (2342727, "free", 1, 256, 2, 6),
            (2342727, "free", 0, 1 << 20, 0, 7),
        ]
        assert next(iter(log)).time_us == (15 * 3600 + 47 * 60 + 2) * 10**6 + 841961
        assert log.failures == 1 and log.devices() == [0]
        assert log.peak_live_bytes() == (1 << 20) + 256

    def test_addresses_are_used_again(self, tmp_path: Path) -> None:
        rows = []
        for size in (8, 16, 24):
            rows += [f"1,00:00:00.000000,allocate,0x10,{size},0", f"1,00:00:00.000000,free,0x10,{size},0"]
        log = read_log(_write(tmp_path / "log.csv", *rows))
        assert [(it.allocation, it.bytes) for it in log] == [
            (0, 8),
            (0, 8),
            (1, 16),
            (1, 16),
            (2, 24),
            (2, 24),
        ]

    def test_older_blocks_and_blocks_that_are_never_freed(self, tmp_path: Path) -> None:
        log = read_log(
            _write(
                tmp_path / "log.csv",
                "1,00:00:00.000000,free,0x10,64,0",
                "1,00:00:00.000000,allocate,0x10,8,0",
                "1,00:00:00.000000,allocate,0x20,16,0xffff000000000000",
            )
        )
        assert (log.skipped_frees, log.skipped_bytes, log.never_freed) == (1, 64, (0, 1))
        assert log.devices() == [-1, 0] and log.peak_live_bytes() == 24

    @pytest.mark.parametrize(
        ("row", "named"),
        [
            ("", "1 fields"),
            ("1,00:00:00.000000,allocate,0x20,8", "5 fields"),
            ("1,00:00:00.000000,allocate,0x20,8,0,0", "7 fields"),
            ("-1,00:00:00.000000,allocate,0x20,8,0", "thread '-1'"),
            ("one,00:00:00.000000,allocate,0x20,8,0", "thread 'one'"),
            ("1,24:00:00.000000,allocate,0x20,8,0", "time '24:00:00.000000'"),
            ("1,00:00:60.000000,allocate,0x20,8,0", "time"),
            ("1,1634567890.123456,allocate,0x20,8,0", "time"),
            ("1,00:00:00.000000,deallocate,0x20,8,0", "action 'deallocate'"),
            ("1,00:00:00.000000,Allocate,0x20,8,0", "action 'Allocate'"),
            ("1,00:00:00.000000,allocate,20 x,8,0", "pointer '20 x'"),
            ("1,00:00:00.000000,allocate,-0x20,8,0", "pointer '-0x20'"),
            ("1,00:00:00.000000,allocate,0x12345678123456781,8,0", "pointer"),
            ("1,00:00:00.000000,allocate,0x20,-8,0", "size '-8'"),
            ("1,00:00:00.000000,allocate,0x20,1e9,0", "size '1e9'"),
            ("1,00:00:00.000000,allocate,0x20,9223372036854775808,0", "size"),
            ("1,00:00:00.000000,allocate,0x20,99999999999999999999999,0", "size"),
            ("1,00:00:00.000000,allocate,0x20,8,blue", "stream 'blue'"),
            ("1,00:00:00.000000,allocate,(nil),8,0", "allocate of 8 bytes at no address"),
            ("1,00:00:00.000000,free,(nil),8,0", "free of 8 bytes at no address"),
            ("1,00:00:00.000000,allocate,0xfffffffffffffff0,17,0", "do not fit"),
            ("1,00:00:00.000000,allocate,0x10,4,0", "not freed since it was in line 2"),
            ("1,00:00:00.000000,free,0x10,4,0", "free of 4 bytes; line 2 allocated 8"),
            ("1," + "0" * 500, "longer than 400"),
            ("1,00:00:00.000000,allocate,0x20,\u0661,0", "ascii"),
            ("1,00:00:00.000000,allocate,0x20,8,0\x00", "stream"),
        ],
        ids=lambda value: value[:40],
    )
    def test_refuses_by_line(self, tmp_path: Path, row: str, named: str) -> None:
        path = _write(tmp_path / "log.csv", "1,00:00:00.000000,allocate,0x10,8,0", row)
        with pytest.raises(ValueError) as caught:
            read_log(path)
        assert f"{path}, line 3: " in str(caught.value) and named in str(caught.value)
        assert len(str(caught.value)) < 300 + len(str(path))

    def test_refuses_a_second_free(self, tmp_path: Path) -> None:
        rows = ["1,00:00:00.000000,allocate,0x10,8,0", *["1,00:00:00.000000,free,0x10,8,0"] * 2]
        with pytest.raises(ValueError, match="line 4: 0x10 is freed, as it was in line 3"):
            read_log(_write(tmp_path / "log.csv", *rows))
        with pytest.raises(
            ValueError, match="line 3: 0x10 is freed, as it was in line 2"
        ):  # freed although the allocation is older than the log
            read_log(_write(tmp_path / "log.csv", *rows[1:]))

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            (b"", "empty"),
            (b"\n", "line 1: the header is ''"),
            (b"Thread,Time,Action,Pointer,Size\n", "line 1: the header"),
            (b"\x89PNG\r\n\x1a\n", "line 1"),
            (HEADER.encode(), "line 1: the last line is cut off"),
            (HEADER.encode() + b"\n1,00:00:00.00", "line 2: the last line is cut off"),
        ],
        ids=["empty", "blank", "columns", "picture", "header alone", "cut off"],
    )
    def test_refuses_files_that_are_no_log(self, tmp_path: Path, content: bytes, named: str) -> None:
        path = tmp_path / "log.csv"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=named):
            read_log(path)

    def test_stops_at_the_most_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch_uvm._tools.allocation_logs.MOST_ROWS", 3)
        rows = [f"1,00:00:00.000000,allocate,{at:#x},8,0" for at in (16, 32, 48, 64)]
        assert len(read_log(_write(tmp_path / "log.csv", *rows[:3]))) == 3
        with pytest.raises(ValueError, match="line 5: more than 3 rows"):
            read_log(_write(tmp_path / "log.csv", *rows))


def test_a_recording_costs_no_descriptor(on: torch.device, tmp_path: Path) -> None:
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        torch_uvm.tools.record_allocations(tmp_path / "log.csv").stop()
    assert len(os.listdir("/proc/self/fd")) == count
