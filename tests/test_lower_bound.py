"""benchmarks/lower_bound.py on traces that are small enough to compute by hand."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def lower_bound() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "lower_bound.py"
    spec = importlib.util.spec_from_file_location("lower_bound", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lower_bound"] = module
    spec.loader.exec_module(module)
    return module


class _Script:
    """Writes a trace. A storage is described in its first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = [{"format": "torch_uvm accesses", "version": 1, "budgets": [None]}]

    def storage(self, name: int, size: int, resident: bool = False, device: int = 0) -> None:
        self.lines.append({"storage": name, "device": device, "bytes": size, "resident": resident})

    def op(
        self,
        reads: list[int],
        writes: list[int] | None = None,
        births: dict[int, int] | None = None,
        deaths: list[int] | None = None,
        in_place: bool = False,
    ) -> None:
        self.lines.append(
            {"operator": "x", "time": 0, "in_place_ok": in_place, "reads": reads, "writes": writes or []}
        )
        self.lines += [{"birth": name, "device": 0, "bytes": size} for name, size in (births or {}).items()]
        self.lines += [{"death": name} for name in deaths or []]

    def step(self) -> None:
        self.lines.append({"step": "end"})

    def write(self) -> Path:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self.path


@pytest.fixture
def script(tmp_path: Path) -> _Script:
    return _Script(tmp_path / "trace")


def test_everything_fits(lower_bound: ModuleType, script: _Script) -> None:
    script.storage(1, 10)
    for _ in range(4):
        script.op([1], births={2: 5}, deaths=[2])
        script.step()
    got = lower_bound.bound(script.write(), 15)
    assert (got["fetched"], got["written_back"], got["steps"]) == (0, 0, 2)


def test_the_cold_start_counts_in_a_short_trace(lower_bound: ModuleType, script: _Script) -> None:
    script.storage(1, 10)
    script.op([1])
    got = lower_bound.bound(script.write(), 15)
    assert (got["fetched"], got["steps"]) == (10, 0)


def test_a_ring_of_three_with_room_for_two(lower_bound: ModuleType, script: _Script) -> None:
    """The sequence 1 2 3 1 2 3 ...: of every three uses MIN fetches 1.5 storages, also byte by byte."""
    for name in (1, 2, 3):
        script.storage(name, 10)
    for _ in range(21):
        for name in (1, 2, 3):
            script.op([name])
        script.step()
    got = lower_bound.bound(script.write(), 20)
    assert got["fetched"] == pytest.approx(15, abs=1)
    assert got["written_back"] == 0  # they start on the host, and are only read
    assert lower_bound.bound(script.path, 30)["fetched"] == 0
    assert lower_bound.bound(script.path, 10)["fetched"] == 30


def test_a_part_of_a_storage_may_stay_resident(lower_bound: ModuleType, script: _Script) -> None:
    """Two activations of 10 bytes with a budget of 18: two bytes are evicted and fetched, not ten."""
    for step in range(4):
        a, b = 10 * step + 1, 10 * step + 2
        script.op([], births={a: 10})
        script.op([], births={b: 10})
        script.op([b], deaths=[b])
        script.op([a], deaths=[a])
        script.step()
    got = lower_bound.bound(script.write(), 18)
    assert (got["fetched"], got["written_back"]) == (2, 2)


def test_written_storages_are_written_back_again(lower_bound: ModuleType, script: _Script) -> None:
    for name in (1, 2):
        script.storage(name, 10)
    for _ in range(4):
        script.op([], writes=[1])
        script.op([2])
        script.step()
    got = lower_bound.bound(script.write(), 10)
    assert (got["fetched"], got["written_back"]) == (20, 10)


def test_uses_in_place_are_counted_apart(lower_bound: ModuleType, script: _Script) -> None:
    """A step uses a parameter twice, and its state once, by an optimizer that may use it in place."""
    script.storage(1, 10, resident=True)
    script.storage(2, 20)
    for _ in range(5):
        script.op([1])
        script.op([1])
        script.op([], writes=[1, 2], in_place=True)
        script.step()
    got = lower_bound.bound(script.write(), 10)
    assert (got["fetched"], got["written_back"]) == (0, 0)
    assert (got["in_place_read"], got["in_place_written"]) == (20, 20)
    # With room for a part of the state, that part stays resident.
    got = lower_bound.bound(script.path, 22)
    assert (got["in_place_read"], got["in_place_written"]) == (8, 8)
    assert lower_bound.bound(script.path, 30)["in_place_read"] == 0


def test_operands_beyond_the_budget_are_reported(lower_bound: ModuleType, script: _Script) -> None:
    script.storage(1, 10)
    script.storage(2, 10)
    script.op([1, 2])
    assert lower_bound.bound(script.write(), 15)["over"] == 1


def test_a_mark_after_a_mark_ends_no_step(lower_bound: ModuleType, script: _Script) -> None:
    """An optimizer marks its step, and a script may mark the same step."""
    script.storage(1, 10)
    script.storage(2, 10)
    for _ in range(4):
        script.op([1])
        script.op([2])
        script.step()
        script.step()
    result = lower_bound.bound(script.write(), 10)
    assert result["steps"] == 2
    assert result["fetched"] == 20


def test_storages_do_not_exist_before_their_first_record(lower_bound: ModuleType, script: _Script) -> None:
    """A storage without a recorded creation takes no room before its first record."""
    script.storage(1, 10, resident=True)
    for late in (2, 3, 4):
        script.op([1])
        script.storage(late, 10, resident=True)
        script.op([late], deaths=[late])
        script.step()
    result = lower_bound.bound(script.write(), 10)
    assert result["steps"] == 1
    assert result["fetched"] == 10  # storage 1, which each of them has evicted
    assert result["written_back"] == 0  # written back once, in the first step


def test_other_devices_do_not_count(lower_bound: ModuleType, script: _Script) -> None:
    script.storage(1, 10)
    script.storage(2, 1000, device=1)
    script.op([1, 2])
    path = script.write()
    assert lower_bound.bound(path, 15)["fetched"] == 10
    assert lower_bound.bound(path, 5000, device=1)["fetched"] == 1000


def test_it_is_belady_on_pages_of_one_byte(lower_bound: ModuleType, tmp_path: Path) -> None:
    """Random reads of storages of any size, compared with the textbook's MIN over their bytes."""
    for seed in range(20):
        draw = random.Random(seed)
        script = _Script(tmp_path / f"trace{seed}")
        sizes = {name: draw.randint(1, 6) for name in range(1, 8)}
        for name, size in sizes.items():
            script.storage(name, size)
        order = [draw.choice(list(sizes)) for _ in range(60)]
        for name in order:
            script.op([name])
        budget = draw.randint(max(sizes.values()), sum(sizes.values()))

        pages: set[tuple[int, int]] = set()
        faults = 0

        def next_use(page: tuple[int, int], at: int, order: list[int] = order) -> int:
            return next((later for later in range(at, len(order)) if order[later] == page[0]), len(order))

        for at, name in enumerate(order):
            wanted = {(name, byte) for byte in range(sizes[name])}
            faults += len(wanted - pages)
            pages |= wanted
            victims = sorted(pages - wanted, key=lambda page: next_use(page, at + 1), reverse=True)
            pages -= set(victims[: max(0, len(pages) - budget)])
        assert lower_bound.bound(script.write(), budget)["fetched"] == faults, seed


def test_the_floor_has_three_terms(lower_bound: ModuleType) -> None:
    moved = {"fetched": 52e6, "written_back": 104e6, "in_place_read": 41e6, "in_place_written": 20e6}
    assert lower_bound.phase_floor(moved, 0.5, 3.0) == pytest.approx(2 + 3 + 1)
    assert lower_bound.phase_floor(moved, 10, 0.1) == pytest.approx(10 + 1 + 1)


def test_it_imports_nothing_of_the_library() -> None:
    source = (Path(__file__).resolve().parent.parent / "benchmarks" / "lower_bound.py").read_text()
    imported = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imported and not any("torch" in line for line in imported)


class TestCommand:
    def test_prints_and_writes(
        self, lower_bound: ModuleType, script: _Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script.storage(1, 10)
        script.op([1])
        out = tmp_path / "out.json"
        argv = [str(script.write()), "--budget", "1KiB", "--forward-ms", "1", "--backward-ms", "2"]
        assert lower_bound.main([*argv, "--json", str(out)]) == 0
        assert json.loads(out.read_text())["floor_ms"] == pytest.approx(3)
        assert "floor_ms" in capsys.readouterr().out

    @pytest.mark.parametrize("text", ["", "null\n", '{"format": "other"}\n', "no json\n"])
    def test_refuses_other_files(self, lower_bound: ModuleType, tmp_path: Path, text: str) -> None:
        path = tmp_path / "trace"
        path.write_text(text)
        with pytest.raises(SystemExit):
            lower_bound.main([str(path), "--budget", "1GiB"])

    def test_refuses_another_version(self, lower_bound: ModuleType, tmp_path: Path) -> None:
        path = tmp_path / "trace"
        path.write_text('{"format": "torch_uvm accesses", "version": 3}\n')
        with pytest.raises(ValueError, match="version 3"):
            lower_bound.bound(path, 1)
