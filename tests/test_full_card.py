"""benchmarks/full_card.py: every row in small, runs that end early, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _gpu_guard import GIB, MARGIN, Refused
from _spawn import Spawn

from torch_uvm import _C

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import _full_card_table as table  # noqa: E402
import _runs as runs  # noqa: E402
import full_card  # noqa: E402

STEP = {"what": "step", "seconds": 0.5, "result": (1.5).hex(), "at_s": 1.0, "rss": 7}
MADE = {"what": "made", "parameters": 10, "tokens": 100, "flops": 1e9, "at_s": 0.5, "rss": 5}


@pytest.fixture
def watch() -> Iterator[runs.Watch]:
    with runs.Watch(None) as made:
        yield made


def rehearse(folder: Path, *words: str) -> dict[str, Any]:
    folder.mkdir()
    args = [str(ROOT / "benchmarks" / "full_card.py"), "--tiny", *words, "--json", "out.json"]
    Spawn(folder)(args=args)
    return dict(json.loads((folder / "out.json").read_text()))


def test_every_row_in_small(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    two = ("--steps", "2", "--deterministic", "--modes")
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(rehearse, tmp_path / "one", *two, "uvm", "--rows", "a,b,c"),
            pool.submit(rehearse, tmp_path / "two", *two, "uvm,incore", "--rows", "d"),
            pool.submit(rehearse, tmp_path / "three", *two, "uvm", "--rows", "e,f"),
        ]
        found = [run for future in futures for run in future.result()["runs"]]
    assert [(it["row"], it["mode"]) for it in found] == [
        ("a", "uvm"), ("b", "uvm"), ("c", "uvm"), ("d", "uvm"), ("d", "incore"), ("e", "uvm"), ("f", "uvm")
    ]  # fmt: skip
    assert {(it["status"], it["steps"]) for it in found} == {("ok", 2)}
    managed = [it for it in found if it["mode"] == "uvm"]
    assert all(0 < it["peak_managed_bytes"] <= it["limit"] for it in managed)
    assert all(it["residency"]["fetched"]["bytes"] > 0 for it in managed if it["budget"])
    assert found[3]["results"] == found[4]["results"]
    assert list(table.losses_compared(found)) == ["d uvm and d incore: equal bits in 2 steps"]


def test_a_plan_in_small(tmp_path: Path) -> None:
    plans = rehearse(tmp_path / "plan", "--plan", "--rows", "d,f")["plans"]
    assert 0 < plans["d"]["bound_ms"] <= plans["d"]["step_ms"]
    assert plans["f"]["budget"] == full_card.TINY_BUDGET


class TestRuns:
    def test_a_run_that_is_cut_off_tells_its_steps(
        self, watch: runs.Watch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runs, "LEAVING", 0.1)
        code = f"import threading; print({json.dumps(STEP)!r}, flush=True); threading.Event().wait()"
        found = runs.run_child([sys.executable, "-c", code], os.environ, 2.0, watch)
        assert found.lines == [STEP]
        assert found.status == "cut off after 2 s"

    def test_an_error_is_named(self, watch: runs.Watch) -> None:
        code = "import sys; print('more'); sys.exit('torch.OutOfMemoryError: too much')"
        found = runs.run_child([sys.executable, "-c", code], os.environ, 60, watch)
        assert found.status == "failed: torch.OutOfMemoryError: too much"
        assert found.output[0] == "more"

    def test_a_signal_is_named(self, watch: runs.Watch) -> None:
        found = runs.run_child([sys.executable, "-c", "import os; os.abort()"], os.environ, 60, watch)
        assert found.status == "died of SIGABRT"

    def test_variables_of_torch_uvm_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_UVM_CONF", "limit:none")
        assert not any(key.startswith("TORCH_UVM") for key in runs.environment())

    def test_the_host_keeps_some_memory(self, watch: runs.Watch, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runs, "host_available", lambda: runs.LEAST_HOST - 1)
        code = "import threading; threading.Event().wait()"
        found = runs.run_child([sys.executable, "-c", code], os.environ, 60, watch)
        assert found.status == "ended: the host had less than 3 GiB left"

    def test_memory_of_the_devices_is_over_what_was_before(self) -> None:
        """And since the model is made. Each line has what was taken until then."""
        free = [75 * GIB, 40 * GIB]
        with runs.Watch(lambda: free) as watch:
            found = runs.Result()
            watch.begin(subprocess.Popen([sys.executable, "-c", ""], text=True))
            free[0] -= 45 * GIB
            assert watch.taken() == 45 * GIB
            free[0] += 40 * GIB
            assert (watch.taken(), watch.taken(again=True)) == (45 * GIB, 5 * GIB)
            free[0] += 5 * GIB
            watch.end(found)
            assert (found.device_bytes, found.lowest_free) == (5 * GIB, 30 * GIB)
            code = f"print({json.dumps(STEP)!r})"
            found = runs.run_child([sys.executable, "-c", code], os.environ, 60, watch)
            assert found.lines == [STEP | {"device_bytes": 0}]


class TestFigures:
    def test_a_step_is_the_median_of_the_second_half(self) -> None:
        steps = [STEP | {"seconds": float(at), "at_s": float(at)} for at in (9, 8, 7, 1, 2, 3)]
        figures = full_card.summary(runs.Result(lines=[MADE, *steps]))
        assert (figures["step_s"], figures["tokens_per_s"], figures["flops"]) == (2, 50, 5e8)
        assert (figures["first_s"], figures["tenth_at_s"]) == ([9, 8, 7, 1, 2, 3], None)

    def test_different_bits_are_named(self) -> None:
        run = {"row": "a", "options": "", "deterministic": True, "steps": 2, "mode": "uvm"}
        one = run | {"results": ["0x1p0", "0x1p1"]}
        other = run | {"mode": "incore", "results": ["0x1p0", "0x1p2"]}
        assert list(table.losses_compared([one, other])) == ["a uvm and a incore: step 1 differs"]
        assert list(table.losses_compared([one, other | {"row": "b"}])) == []


class TestLimits:
    @pytest.fixture(autouse=True)
    def nothing_allocated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_C, "in_use", lambda: False)

    def free(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        monkeypatch.setattr(full_card, "NVML", {"NVML": lambda: [count]})
        monkeypatch.setattr(full_card, "free_by_nvml", lambda: [count])

    def test_the_card_less_the_margin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free(monkeypatch, 79 * GIB)
        assert full_card.limits("a", False) == (79 * GIB - MARGIN, None)
        assert full_card.limits("e", False) == (17 * GIB, 16 * GIB)

    def test_too_little_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free(monkeypatch, 17 * GIB + MARGIN - 1)
        with pytest.raises(Refused, match="17.00 GiB"):
            full_card.limits("e", False)

    def test_in_core_only_where_it_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free(monkeypatch, 79 * GIB)
        assert "it needs 103 GiB; 79.0 GiB are free" in str(full_card.not_run("a", "incore", False))
        assert full_card.not_run("d", "incore", False) is None

    def test_a_run_that_left_the_limit_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, watch: runs.Watch
    ) -> None:
        def exceeding(words: list[str], *_: object, **__: object) -> runs.Result:
            stats = Path(words[words.index("--stats") + 1])
            stats.write_text(json.dumps({"limit": None, "peak_managed_bytes": 0, "residency": {}}))
            return runs.Result(lines=[MADE, STEP])

        monkeypatch.setattr(full_card, "run_child", exceeding)
        with pytest.raises(Refused, match="the limit is None"):
            full_card.run("a", "uvm", full_card.parse_arguments(["--tiny"]), watch)
