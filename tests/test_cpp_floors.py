"""The C++ tests of the floors below torch, each case a test of its own. They need no torch_uvm.

`make cpp` builds them into build/cpp; `--cpp-build` names another folder, one with sanitizers, say.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parent / "cpp").glob("test_*.cpp"))
NOT_BUILT = "[not built]"
LEFT_OUT = "[left out]"
#: Seconds for a case; some sweeps of build/cpp's half a minute take more than ten under a sanitizer.
LONGEST = {"cpp": 600, "elsewhere": 3600}


def cases(binary: Path) -> list[str]:
    """What the binary has; one that is missing or has none is a case that fails, not one that is left out."""
    if not binary.exists():
        return [NOT_BUILT]
    listed = subprocess.run([binary, "--list"], capture_output=True, text=True, timeout=60, check=True)
    return listed.stdout.split() or ["[no cases]"]


def left_out(folder: Path) -> dict[str, str]:
    """Why the build left some out, by name."""
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
