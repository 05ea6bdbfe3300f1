"""`python -m torch_uvm run --report out.html`: the page's figures, its text, and its privacy."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import _report_pages as pages
import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C, cli, report
from torch_uvm.report import allocation_sites, samples
from torch_uvm.report.samples import Sample, Sampler

EMU = {"TORCH_UVM_DEVICE": "emu"}
RUN = ["-m", "torch_uvm", "run"]

#: More than its budget of 32 MiB. The largest storage is allocated on a line of its own: 12 MiB.
TRAINING = """
import torch

device = torch.accelerator.current_accelerator()


def largest():
    return torch.ones(3, 1024, 1024, device=device)  # twelve


kept = largest()
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6)))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(64, 1024, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
kept.sum().item()
"""


def line_of(script: str, text: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pages.Page, dict[str, Any]]:
    """The page of TRAINING, and the `--stats` output of the same run."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(TRAINING)
    options = "--budget 32MiB --optimizer in_place --stats stats.json --report out.html".split()
    done = Spawn(folder)(args=[*RUN, *options, "train.py", "--token", "hunter2"], env=EMU)
    assert done.stdout == ""
    assert done.stderr.count("\n") == done.stderr.count("needs less with fused=True") == 1
    assert sorted(it.name for it in folder.iterdir()) == ["out.html", "stats.json", "train.py"]
    return pages.read(folder / "out.html"), json.loads((folder / "stats.json").read_text())


class TestAPage:
    def test_has_the_figures_of_the_run(self, run: tuple[pages.Page, dict[str, Any]]) -> None:
        seen, stats = run
        residency = stats["residency"]
        assert residency["fetched"]["bytes"] > 0 and residency["written_back"]["bytes"] > 0
        for key in (
            "fetched",
            "written_back",
            "dropped_clean",
            "used_in_place",
            "moved",
            "waited",
            "made_room",
        ):
            for what in ("count", "bytes"):
                assert seen.figures[f"{key}.{what}"] == residency[key][what], key
            assert seen.figures[f"{key}.ms"] == pytest.approx(residency[key]["ms"], rel=1e-6), key
        for key in ("plan_hits", "plan_misses", "over_budget", "failures"):
            assert seen.figures[key] == residency[key]
        assert seen.figures["peak-0"] == residency["peak_device_bytes"]["0"]
        assert seen.figures["budget-0"] == 32 << 20
        assert seen.figures["peak-managed"] == stats["memory"]["reserved_bytes.all.peak"]
        assert seen.figures["peak-host"] >= residency["host_bytes"] > 0
        assert seen.figures["steps"] == 4

    def test_names_the_lines_of_the_script(self, run: tuple[pages.Page, dict[str, Any]]) -> None:
        seen, _ = run
        rows = {row[0]: row[1:] for row in seen.rows["by-traffic"]}
        largest = [place for place, row in rows.items() if row[4] == "12.00 MiB"]
        assert largest == [
            f"train.py:{line_of(TRAINING, 'twelve')} in largest return torch.ones(3, 1024, 1024, "
            "device=device) # twelve"
        ]
        assert rows[largest[0]][5:] == ["1", "12.00 MiB"]
        traffic = [row[0] for row in seen.rows["by-traffic"]]
        for text in ("model.to(device)", "optimizer.step()"):
            assert any(it.startswith(f"train.py:{line_of(TRAINING, text)} ") for it in traffic), text
        assert any(it.startswith("backward pass, AddmmBackward0") for it in rows)

    def test_its_traffic_adds_up(self, run: tuple[pages.Page, dict[str, Any]]) -> None:
        seen, stats = run
        for column, key in ((2, "fetched"), (3, "written_back"), (4, "used_in_place")):
            told = sum(int(row[column].replace(",", "")) for row in seen.rows["by-traffic"])
            assert told == stats["residency"][key]["count"], key

    def test_gives_advice(self, run: tuple[pages.Page, dict[str, Any]]) -> None:
        seen, _ = run
        assert "modelled" in seen.advice
        assert "misses" not in seen.advice, "four steps are too few"
        assert "fits" not in seen.advice and "no-budget" not in seen.advice

    def test_has_pictures_with_names(self, run: tuple[pages.Page, dict[str, Any]]) -> None:
        seen, _ = run
        assert len(seen.pictures) == 2 and all(seen.pictures)

    def test_contains_no_arguments(self, run: tuple[pages.Page, dict[str, Any]]) -> None:
        assert "hunter2" not in run[0].text and "hunter2" not in str(run[0].rows)


class TestHowRunsEnd:
    def _run(
        self, spawn: Spawn, script: str, *options: str, name: str = "script.py"
    ) -> tuple[pages.Page, Any]:
        (spawn.folder / name).write_text(script)
        done = spawn(args=[*RUN, *options, "--report=out.html", name], env=EMU, check=False)
        return pages.read(spawn.folder / "out.html"), done

    def test_a_script_that_fails(self, spawn: Spawn) -> None:
        script = "import torch\nx = torch.ones(1 << 20, device='emu')\nraise ValueError('hunter2')\n"
        seen, done = self._run(spawn, script)
        assert done.returncode == 1 and done.stderr.endswith("ValueError: hunter2\n")
        assert "torch_uvm" not in done.stderr
        assert "ended by ValueError at " in seen.text and "script.py:3" in seen.text
        assert "hunter2" not in seen.text  # messages may contain secrets
        assert seen.figures["peak-managed"] >= 4 << 20
        assert "Nothing was short" in seen.advice["fits"]

    def test_a_script_that_never_allocates(self, spawn: Spawn) -> None:
        seen, done = self._run(spawn, "import sys\nsys.exit(3)\n")
        assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
        assert "ended with exit status 3" in seen.text
        assert list(seen.advice) == ["nothing", "modelled"]
        assert seen.figures["peak-managed"] == 0 and "by-traffic" not in seen.rows

    def test_markup_in_names_is_text_and_want_of_memory_is_quoted(self, spawn: Spawn) -> None:
        function = (
            "def f():\n    return torch.ones(1 << 20, device='emu') # </code><script>alert(1)</script>\n"
        )
        script = f"import torch\n{function}x = f()\ny = torch.ones(64 << 20, device='emu')\n"
        name = "<script>alert(1)<\u202e&.py"
        seen, done = self._run(spawn, script, "--limit", "32MiB", "--budget", "none", name=name)
        assert done.returncode == 1
        assert "ended by OutOfMemoryError" in seen.text and "256.00 MiB" in seen.text
        assert "oom" in seen.advice and "no-budget" in seen.advice and seen.figures["num_ooms"] >= 1
        assert "script" not in seen.tags and "\u202e" not in seen.text
        assert "<script>alert(1)<\\u202e&.py" in seen.text
        assert "</code><script>alert(1)</script>" in seen.rows["by-traffic"][0][0]

    def test_a_page_that_cannot_be_written_changes_nothing_else(self, spawn: Spawn) -> None:
        (spawn.folder / "gone").mkdir()
        (spawn.folder / "script.py").write_text("import os\nos.rmdir('gone')\nprint('done')\n")
        done = spawn(args=[*RUN, "--report", "gone/out.html", "script.py"], env=EMU)
        assert done.stdout == "done\n" and "no report in" in done.stderr

    def test_a_folder_that_is_not_there_is_refused_before(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(SystemExit):
            cli.main(["run", "--report", "none/out.html", "script.py"])
        assert "'none/out.html': there is no folder" in capsys.readouterr().err
        monkeypatch.setenv(report.PATH, "none/out.html")
        with pytest.raises(ValueError, match="TORCH_UVM_REPORT='none/out.html'"):
            report.start_from_environment()


class TestProcesses:
    def test_ranks_have_pages_of_their_own(self, spawn: Spawn) -> None:
        (spawn.folder / "script.py").write_text(
            "import os, torch, torch_uvm\nx = torch.ones((1 + int(os.environ['RANK'])) << 20, device='emu')\n"
        )
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        spawn(args=[*RUN, "--report", "out.html", *torchrun, "script.py"], env=EMU)
        assert sorted(it.name for it in spawn.folder.glob("*.html")) == [
            "out.html",
            "out.rank0.html",
            "out.rank1.html",
        ]
        for rank in range(2):
            seen = pages.read(spawn.folder / f"out.rank{rank}.html")
            assert f"rank {rank}" in seen.text and seen.rows["by-traffic"][0][5] == f"{4 + 4 * rank}.00 MiB"

    def test_the_environment_variable_requests_it(self, spawn: Spawn) -> None:
        (spawn.folder / "script.py").write_text("raise SystemExit(3)\n")
        spawn(args=[*RUN, "script.py"], env={**EMU, "TORCH_UVM_REPORT": "out.html"}, check=False)
        seen = pages.read(spawn.folder / "out.html")
        assert seen.text.strip().startswith("torch_uvm: script.py") and "exit status 3" in seen.text

    def test_other_children_have_no_page(self, spawn: Spawn) -> None:
        (spawn.folder / "script.py").write_text(
            """
import os, subprocess, sys
import torch, torch_uvm

for code in ("x = torch.ones(1 << 20, device='emu')", "pass"):
    subprocess.run([sys.executable, "-c", "import torch, torch_uvm; " + code], check=True)
pid = os.fork()
if pid == 0:
    sys.exit(0)  # runs the exit handlers
os.waitpid(pid, 0)
assert not os.path.exists('out.html')
"""
        )
        spawn(args=[*RUN, "--report", "out.html", "script.py"], env=EMU)
        assert [it.name for it in spawn.folder.glob("*.html")] == ["out.html"]


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[report.Recording]:
    for name in (report.PATH, report.OF):
        monkeypatch.setenv(name, "")  # restored afterwards
    made = report.start(tmp_path / "out.html", "a test")
    yield made
    made.finish()


class TestRecording:
    def test_commands_that_run_no_script_have_no_page(
        self, recording: report.Recording, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert report.current() is recording
        assert cli.main(["info"]) == 0 and "torch_uvm" in capsys.readouterr().out
        assert report.current() is None and not recording.path.exists()

    def test_a_killed_run_leaves_the_page_of_the_previous_minute(self, recording: report.Recording) -> None:
        recording._sampler._write()
        assert "still running" in pages.read(recording.path).text
        recording.finish()
        assert "still running" not in pages.read(recording.path).text

    def test_ends_once_and_leaves_nothing_running(self, recording: report.Recording) -> None:
        assert recording._sampler._thread.is_alive()
        recording.finish()
        recording.path.unlink()
        recording.finish()
        assert not recording.path.exists() and not recording._sampler._thread.is_alive()
        torch_uvm.enable()
        before = _C.allocation_site_figures()
        held = torch.ones(1 << 20, device=torch.accelerator.current_accelerator())
        assert held.numel() and _C.allocation_site_figures() == before

    def test_the_line_is_the_innermost_outside_torch(self, recording: report.Recording) -> None:
        torch_uvm.enable()
        device = torch.accelerator.current_accelerator()
        line = sys._getframe().f_lineno + 1
        layer = torch.nn.Linear(700, 700, device=device)  # made in torch/nn/modules/linear.py
        sizes = {it.bytes: it for it in allocation_sites.storages()}
        found = sizes[layer.weight.nbytes]
        assert (found.file, found.line) == (__file__, line)
        assert found.function == "test_the_line_is_the_innermost_outside_torch"
        assert "torch.nn.Linear(700, 700" in found.source
        assert (found.made, found.most_alive, found.traffic) == (1, 1, 0)

    def test_python_threads_are_seen_and_pending_exceptions_are_kept(
        self, recording: report.Recording
    ) -> None:
        torch_uvm.enable()
        device = torch.accelerator.current_accelerator()
        made: list[Any] = []

        def work() -> None:
            try:
                raise KeyError("first")
            except KeyError as error:
                made.append(torch.ones(123, 1024, device=device))
                made.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        found = next(it for it in allocation_sites.storages() if it.bytes == 123 * 4096)
        assert found.function == "work" and str(made[1]) == "'first'"

    @pytest.mark.usefixtures("steps_at_once_afterwards")
    def test_temporaries_of_a_deferred_update_have_no_line(self, recording: report.Recording) -> None:
        torch_uvm.enable(budget="10MiB", optimizer="deferred")
        weight = torch.nn.Parameter(torch.ones(700, 700, device=torch.accelerator.current_accelerator()))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], foreach=True)
        optimizer.step()
        assert _C.pending_updates() == 1
        line = sys._getframe().f_lineno + 1
        _C.flush_all_pending()
        found = [it for it in allocation_sites.storages() if it.bytes == weight.nbytes]
        assert not [it for it in found if it.line == line]
        assert [it for it in found if it.file is None]

    def test_a_report_changes_neither_results_nor_budgets(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tensors under a budget, so that their storages are moved while the report counts."""
        for name in (report.PATH, report.OF):
            monkeypatch.setenv(name, "")  # restored afterwards
        torch_uvm.enable(budget="8MiB")
        device = torch.accelerator.current_accelerator()

        def program() -> list[float]:
            torch.manual_seed(1)
            kept = [torch.randn(512, 1024, device=device) for _ in range(8)]
            for _ in range(3):
                for index in range(8):
                    kept[index] = kept[index].mul(1.25) + kept[(index + 3) % 8]
            return [it.sum().item() for it in kept]

        plain = program()
        recorded = report.start(tmp_path / "out.html", "a test")
        try:
            assert program() == plain
        finally:
            recorded.finish()
        seen = pages.read(tmp_path / "out.html")
        assert seen.rows["by-traffic"] and seen.figures["fetched.bytes"] > 0


class TestSampler:
    def test_is_bounded_and_keeps_peaks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        sampler = Sampler(lambda: None)
        peak = Sample(0, resident={0: 10**9}, host=7)
        monkeypatch.setattr(
            sampler, "_measure", lambda: replace(peak if now[0] == 777 else Sample(0), seconds=now[0])
        )
        intervals = set()
        for _ in range(20000):
            now[0] += 1
            sampler.take()
            intervals.add(sampler._interval)
        taken = sampler.samples
        assert len(taken) <= samples.MOST_SAMPLES
        assert taken[0].seconds == 1 and taken[-1].seconds == 20000
        assert [it.seconds for it in taken] == sorted(it.seconds for it in taken)
        assert sum(it.resident.get(0, 0) == 10**9 for it in taken) == 1
        assert max(it.host for it in taken) == 7
        assert len(intervals) > 1 and max(intervals) > 16 * min(intervals)
