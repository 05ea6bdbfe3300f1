"""Runs the C++ tests of the layers below torch, each case as a test of its own. They do not need torch_uvm.

`make cpp` builds them into build/cpp; `--cpp-build` names another folder, for example one with sanitizers.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parent / "cpp").glob("test_*.cpp"))
NOT_BUILT = "[not built]"
LEFT_OUT = "[left out]"
#: Timeout per case. Some take half a minute in build/cpp, and more than ten minutes under a sanitizer.
LONGEST = {"cpp": 600, "elsewhere": 3600}


def cases(binary: Path) -> list[str]:
    """The cases of a binary. A missing binary, or one without cases, becomes a failing case instead of
    none."""
    if not binary.exists():
        return [NOT_BUILT]
    listed = subprocess.run([binary, "--list"], capture_output=True, text=True, timeout=60, check=True)
    return listed.stdout.split() or ["[no cases]"]


def left_out(folder: Path) -> dict[str, str]:
    """The reasons why the build left binaries out, by name."""
    listed = folder / "left_out.txt"
    lines = listed.read_text().splitlines() if listed.exists() else []
    return dict(line.split(": ", 1) for line in lines)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    folder: Path = metafunc.config.getoption("--cpp-build").resolve()
    reasons = left_out(folder)
    found = [
        (folder / source.stem, case)
        for source in SOURCES
        for case in ([LEFT_OUT] if source.stem in reasons else cases(folder / source.stem))
    ]
    metafunc.parametrize(("binary", "case"), found, ids=[f"{binary.name}-{case}" for binary, case in found])


def test_case(binary: Path, case: str) -> None:
    if case == LEFT_OUT:
        pytest.skip(left_out(binary.parent)[binary.name])
    assert case != NOT_BUILT, f"{binary} is not there; `make cpp` builds it"
    timeout = LONGEST.get(binary.parent.name, LONGEST["elsewhere"])
    done = subprocess.run([binary, case], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "1 ran, 0 failed" in done.stdout


def test_there_are_sources() -> None:
    assert SOURCES


class TestPlayAccesses:
    """The command-line program. Its simulation is tested in cpp/test_play_accesses.cpp."""

    @staticmethod
    def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(each) for each in (folder / "play_accesses", *arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        mib = 1 << 20
        lines = [{"format": "torch_uvm accesses", "version": 1, "budgets": [None]}]
        lines += [{"storage": weight, "device": 0, "bytes": 8 * mib, "resident": True} for weight in range(4)]
        for _step in range(4):
            for weight in range(4):
                op = {
                    "operator": "aten::mul_",
                    "time": 1.0,
                    "in_place_ok": False,
                    "reads": [],
                    "writes": [weight],
                }
                lines.append(op)
            lines.append({"step": "end"})
        path = tmp_path / "small.trace"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def test_a_row_for_each_budget(self, pytestconfig: pytest.Config, trace: Path) -> None:
        folder = pytestconfig.getoption("--cpp-build").resolve()
        done = self.run(folder, trace, "--budget", "16MiB,64MiB", "--staging", "0", "--step-ms", "0.2")
        assert done.returncode == 0, done.stderr
        head, *rows = [line.split() for line in done.stdout.replace("in place", "in_place").splitlines()]
        tight, roomy = [dict(zip(head, map(float, row), strict=True)) for row in rows]
        assert (tight["budget"], roomy["budget"]) == (16, 64)
        assert 16 <= tight["fetched"] <= 32, "each step must fetch two or more of the four weights"
        assert roomy["fetched"] == roomy["written"] == 0
        assert tight["peak"] <= 16
        assert tight["ms"] > roomy["ms"] >= roomy["compute"] == 0.2  # 16 MiB take 0.3 ms

    def test_marks_do_not_matter_where_the_iteration_is_given(
        self, pytestconfig: pytest.Config, trace: Path, tmp_path: Path
    ) -> None:
        folder = pytestconfig.getoption("--cpp-build").resolve()
        often = tmp_path / "often.trace"
        often.write_text(re.sub(r'(?<="writes": \[[02]]})', '\n{"step": "end"}', trace.read_text()))
        assert often.read_text().count("step") == 4 + 8
        budget = ("--budget", "16MiB", "--staging", "0", "--step-ms", "0.2")
        rows = [self.run(folder, each, *budget, "--iteration", 4).stdout for each in (trace, often)]
        assert rows[0] == rows[1] != self.run(folder, often, *budget).stdout

    def test_errors_are_reported(self, pytestconfig: pytest.Config, trace: Path) -> None:
        folder = pytestconfig.getoption("--cpp-build").resolve()
        trace.write_text(trace.read_text() + "nonsense\n")
        for arguments in ([trace, "--budget", "16MiB"], [trace], ["missing", "--budget", "16MiB"], []):
            done = self.run(folder, *arguments)
            assert done.returncode == 2
            assert done.stderr.startswith(str(folder / "play_accesses"))
