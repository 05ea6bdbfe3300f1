"""Files are data: their content is never executed, sizes are checked, and reports escape their text."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
from _spawn import Spawn
from fuzz_readers import TARGETS, a_log, a_trace, inputs, refused

from torch_uvm._util.escaping import printable
from torch_uvm.allocation_logs import read_log
from torch_uvm.traces import read_trace

PACKAGE = Path(__file__).resolve().parent.parent / "torch_uvm"

#: Functions that could execute a file's content, and their permitted uses: `run` runs the user's script.
RUNS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
MAY = {"cli/run.py": {"exec", "compile"}}

#: A name with terminal control characters, characters that XML forbids, and markup.
EVIL = "\x1b[2J\x07$\\frac$<script>&\u202e.csv"


def what_runs_files(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {it.name.split(".")[0] for it in node.names} & RUNS
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module.split(".")[0]} & RUNS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & CALLS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func) in ("torch.load", "numpy.load", "torch.jit.load"):
                found.add(ast.unparse(node.func))
    return found


def test_no_code_executes_a_files_content() -> None:
    assert what_runs_files("from pickle import load; torch.load(f); eval(x)") == {
        "pickle",
        "torch.load",
        "eval",
    }
    files = sorted(PACKAGE.rglob("*.py"))
    found = {str(it.relative_to(PACKAGE)): what_runs_files(it.read_text()) for it in files}
    assert {name: runs for name, runs in found.items() if runs} == MAY


class TestReaders:
    @pytest.mark.parametrize("target", TARGETS)
    def test_a_changed_file_is_read_or_refused(self, target: str, tmp_path: Path) -> None:
        """`make fuzz` runs this without end."""
        some = itertools.islice(inputs(target, 7), 600)
        no = sum(refused(target, it, tmp_path / "input") for it in some)
        assert 300 < no < 600  # both outcomes occur

    def test_the_fuzzers_seed_files_are_valid(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(a_log())
        (tmp_path / "trace").write_bytes(a_trace())
        assert read_log(tmp_path / "log").failures == 1
        assert len(read_trace(tmp_path / "trace").operators) == 4

    @pytest.mark.parametrize("target", TARGETS)
    def test_a_device_without_an_end_is_refused(self, target: str) -> None:
        with pytest.raises(ValueError, match=r"/dev/zero, line 1: longer than"):
            TARGETS[target][1](Path("/dev/zero"))

    def test_too_many_lines_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "log").write_bytes(a_log())
        (tmp_path / "trace").write_bytes(a_trace())
        monkeypatch.setattr("torch_uvm._tools.allocation_logs.MOST_ROWS", 3)
        monkeypatch.setattr("torch_uvm._tools.access_traces._MOST_LINES", 3)
        with pytest.raises(ValueError, match="line 5: more than 3 rows"):
            read_log(tmp_path / "log")
        with pytest.raises(ValueError, match="line 4: more than 3 lines"):
            read_trace(tmp_path / "trace")

    def test_keys_are_shown_as_text_in_short(self, tmp_path: Path) -> None:
        first = a_trace().splitlines(keepends=True)[0]
        (tmp_path / "trace").write_bytes(first + b'{"death": 1, "\\u001b[2J' + b"x" * 1000 + b'": 2}\n')
        with pytest.raises(ValueError, match="line 2: death has") as caught:
            read_trace(tmp_path / "trace")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 300


class TestReports:
    def test_printable(self) -> None:
        assert printable("äöü 漢字 a.csv") == "äöü 漢字 a.csv"
        assert printable("\x1b[31m\n\u202e\udcff") == r"\x1b[31m\n\u202e\udcff"

    def test_a_replay_escapes_names(self, spawn: Spawn, tmp_path: Path) -> None:
        log = tmp_path / EVIL
        log.write_bytes(a_log())
        arguments = [
            "-m",
            "torch_uvm",
            "tools",
            "replay",
            str(log),
            "--allocator",
            "caching",
            "--repeat",
            "1",
        ]
        done = spawn(args=arguments, env={"TORCH_UVM_DEVICE": "emu"})
        assert all(line.isprintable() for line in done.stdout.splitlines())
        assert printable(EVIL) in done.stdout

    @pytest.mark.parametrize("command", ["replay", "plot"])
    def test_errors_escape_file_names(self, command: str, spawn: Spawn, tmp_path: Path) -> None:
        file = tmp_path / EVIL
        file.write_bytes(b"\x1b[2J\n")
        output = ["-o", "x.png"] if command == "plot" else []
        done = spawn(
            args=["-m", "torch_uvm", command, str(file), *output],
            env={"TORCH_UVM_DEVICE": "emu"},
            check=False,
        )
        assert done.returncode == 2
        assert all(line.isprintable() for line in done.stderr.splitlines())
        assert printable(EVIL) in done.stderr
