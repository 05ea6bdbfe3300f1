"""Replays of logs: figures compared with an independent count, the command line, errors."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C, allocation_iterations, cli, replays
from torch_uvm._tools.allocation_logs import HEADER, read_log
from torch_uvm.cli.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
LOGS = sorted((ROOT / "benchmarks" / "logs").glob("*.csv"))
EMU = {"TORCH_UVM_DEVICE": "emu"}
ALL = replays.allocators()


def _log(path: Path, *rows: str) -> Path:
    """Rows such as `allocate,0x10,8,0`. Thread and time are the same in all rows."""
    lines = [HEADER, *(f"1,00:00:00.000000,{row}" for row in rows)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A loop of four iterations on two streams, with a parameter that stays alive."""
    rows = ["allocate,0x1000,4096,0"]
    for _ in range(4):
        rows += ["allocate,0x2000,1000000,0", "allocate,0x3000,3000000,0x77", "free,0x2000,1000000,0"]
        rows += ["allocate,0x4000,500,0", "free,0x4000,500,0", "free,0x3000,3000000,0x77"]
    return _log(tmp_path / "small.csv", *rows)


def _main(*argv: object) -> int:
    return cli.main(["tools", "replay", *map(str, argv)])


class TestFigures:
    @pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
    def test_live_bytes_of_the_logs_that_ship(self, path: Path) -> None:
        """Compared with a count that uses neither our reader nor our allocators."""
        live: dict[str, int] = {}
        levels = []
        with path.open() as file:
            for row in csv.DictReader(file):
                if row["Action"] == "allocate":
                    live[row["Pointer"]] = int(row["Size"])
                elif row["Action"] == "free":
                    del live[row["Pointer"]]
                levels.append(sum(live.values()))
        assert live == {}  # every allocation has its free
        log = read_log(path)
        assert log.peak_live_bytes() == max(levels)
        iterations = allocation_iterations.find(log)
        for allocator in ALL:
            done = replays.replay(log, allocator, iterations, repeat=1)
            assert done.failure == "" and done.live == levels
            assert all(reserved >= used for reserved, used in zip(done.reserved, done.live, strict=True))
            assert done.peak_reserved >= max(done.reserved) >= done.peak_live

    @pytest.mark.parametrize("allocator", ALL)
    def test_nothing_is_left_behind(self, small: Path, allocator: str) -> None:
        torch_uvm.memory.empty_cache()
        before = _C.managed_bytes()
        log = read_log(small)
        done = replays.replay(log, allocator, allocation_iterations.find(log), repeat=3)
        assert _C.managed_bytes() == before
        assert len(done.seconds) == 3 and all(it > 0 for it in done.seconds)
        assert done.calls == len(log) == 25 and done.peak_live == 4004096

    def test_runtime_calls_of_each_allocator(self, small: Path) -> None:
        log = read_log(small)
        iterations = allocation_iterations.find(log)
        done = {it: replays.replay(log, it, iterations, repeat=1) for it in ALL}
        assert (done["none"].runtime_allocations, done["none"].runtime_frees) == (13, 12)
        assert done["none"].mean_waste == done["none"].waste_at_peak == 0
        assert done["caching"].runtime_allocations < 6 and done["caching"].runtime_frees == 0
        assert done["pool"].runtime_allocations <= done["caching"].runtime_allocations
        assert done["caching"].mean_waste > 0

    def test_a_log_with_failures_and_older_frees(self, tmp_path: Path) -> None:
        path = _log(
            tmp_path / "log.csv",
            "free,0x9000,77,0",
            "allocate failure,(nil),68719476736,0",
            "allocate,0x10,1000,0",
            "free,0x10,1000,0",
        )
        log = read_log(path)
        done = replays.replay(log, "none", allocation_iterations.split_evenly(log, 1), repeat=1)
        assert done.calls == 2 and done.peak_live == 1000

    def test_on_the_host_too(self, tmp_path: Path) -> None:
        path = _log(tmp_path / "log.csv", "allocate,0x10,1000,0xffff000000000000", "allocate,0x20,24,0")
        log = read_log(path)
        for allocator in ALL:
            done = replays.replay(log, allocator, allocation_iterations.find(log), repeat=1)
            assert done.live == [1000, 1024], allocator

    def test_an_interrupt_ends_it(self, small: Path) -> None:
        log = read_log(small)
        before = _C.managed_bytes()

        def interrupt(done: int, of: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            replays.replay(log, "none", allocation_iterations.find(log), progress=interrupt)
        assert _C.managed_bytes() == before

    def test_nothing_but_a_known_allocator(self, small: Path) -> None:
        log = read_log(small)
        with pytest.raises(ValueError, match="no allocator 'stash'.*accepted: none"):
            replays.replay(log, "stash", allocation_iterations.find(log))


class TestCommand:
    def test_prints_its_figures(self, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _main(small, "--allocator", "caching,none", "--repeat", 2) == 0
        printed, said = capsys.readouterr()
        assert said == ""
        lines = printed.splitlines()
        assert lines[0] == "small.csv: 25 rows, 13 allocations, at most 3.82 MiB live, 2 streams"
        assert "never freed in it, and so at its end: 1 allocations" in lines
        assert "iterations: 4 of 6 rows, found by repetition" in lines
        assert [line.split()[0] for line in lines[-3:]] == ["allocator", "caching", "none"]
        cells = next(line for line in lines if line.startswith("none")).split()
        assert cells[-2:] == ["13", "12"] and "0.0" in cells and "3.82" in cells

    def test_runs_all_allocators_by_default(self, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _main(small, "--repeat", 1) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in printed[-len(ALL) :]] == ALL

    def test_explicit_iterations(self, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _main(small, "--allocator", "none", "--repeat", 1, "--iterations", 5) == 0
        assert "iterations: 5, split evenly as asked" in capsys.readouterr().out

    def test_an_allocator_that_runs_out_of_memory_is_reported(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = _log(tmp_path / "log.csv", *(f"allocate,{16 * at + 16:#x},8,0" for at in range(10)))
        # 80 bytes suffice for the runtime, but not for an allocator with 2 MiB segments.
        torch_uvm.set_limit(_C.managed_bytes() + 4096)
        assert _main(path, "--allocator", "none,caching", "--repeat", 1) == 0
        none, caching = capsys.readouterr().out.splitlines()[-2:]
        assert none.split()[-2:] == ["10", "0"]
        assert caching.startswith("caching") and "failed in row 1: " in caching and "limit" in caching
        # No allocator completed.
        assert _main(path, "--allocator", "caching", "--repeat", 1) == 1

    @pytest.mark.parametrize(
        ("argv", "named"),
        [
            (["--allocator", "stash"], "no allocator 'stash'; accepted: none"),
            (["--allocator", ""], "no allocator ''"),
            (["--repeat", "0"], "--repeat 0"),
            (["--iterations", "0"], "0 iterations"),
            (["--iterations", "26"], "26 iterations of a log with 25 events"),
        ],
        ids=" ".join,
    )
    def test_errors(
        self, small: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            _main(small, *argv)
        assert caught.value.code == 2 and named in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("rows", "named"),
        [
            (["allocate,0x10,8,0", "free,0x10,9,0"], "line 3: free of 9 bytes; line 2 allocated 8"),
            (["allocate,0x10,8,0x63000000000000"], "99"),
        ],
        ids=["line", "device"],
    )
    def test_logs_that_it_refuses(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[str], named: str
    ) -> None:
        before = _C.peak_managed_bytes()
        with pytest.raises(SystemExit) as caught:
            _main(_log(tmp_path / "log.csv", *rows))
        assert caught.value.code == 2 and named in capsys.readouterr().err
        assert _C.peak_managed_bytes() <= max(before, 2 << 20)  # the log was not replayed

    def test_no_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            _main(tmp_path / "none.csv")
        assert "none.csv" in capsys.readouterr().err

    def test_from_the_shell(self, small: Path, spawn: Spawn) -> None:
        command = [
            "-m",
            "torch_uvm",
            "tools",
            "replay",
            str(small),
            "--allocator",
            "caching",
            "--repeat",
            "1",
        ]
        done = spawn(args=command, env=EMU)  # a CUDA build without a GPU says so unless it is told
        assert "caching" in done.stdout and done.stderr == ""


class TestProgress:
    def test_progress_is_limited(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: now)
        said = []
        with Progress("replaying on caching") as progress:
            for now in (100.5, 101.9, 102.1, 103.0, 112.2, 112.3):  # the clock's readings
                progress(int(now), 200)
                said.append(capsys.readouterr().err)
        assert said == ["", "", "replaying on caching: 51 %\n", "", "replaying on caching: 56 %\n", ""]


class TestShippedLogs:
    def test_there_are_three_and_they_are_small(self) -> None:
        assert [path.stem for path in LOGS] == ["cnn", "ragged", "transformer"]
        for path in LOGS:
            assert 100 <= len(read_log(path)) <= 2500 and path.stat().st_size < 200_000

    def test_their_loops_are_found(self) -> None:
        found = {path.stem: allocation_iterations.find(read_log(path)) for path in LOGS}
        assert "by repetition but for sizes" in found["ragged"].how and found["ragged"].count >= 8
        for name in ("cnn", "transformer"):
            assert found[name].how.endswith("by repetition") and found[name].count >= 3
