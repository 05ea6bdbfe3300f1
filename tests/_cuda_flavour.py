"""Builds the CUDA flavour by scripts/check_cuda_flavour.py, without CUDA and without a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LEFT_OUT = os.environ.get("TORCH_UVM_TEST_CUDA") == "0"
REASON = "TORCH_UVM_TEST_CUDA=0 leaves the CUDA flavour out"


sys.path.insert(0, str(SCRIPTS))


def script(name: str) -> ModuleType:
    """One of scripts/*.py, as a module. Scripts import their neighbours."""
    return importlib.import_module(name)


flavour = script("check_cuda_flavour")
PINNED: list[str] = flavour.versions()
#: The newest. `make test-cuda-flavour` and `make test-nightly` take all.
VERSIONS = PINNED if os.environ.get("TORCH_UVM_TEST_CUDA") == "all" else PINNED[-1:]


@cache
def build(version: str) -> str:
    """Fetches, compiles and links, unless that is up to date. Returns the error message, or an empty
    string."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "check_cuda_flavour.py", "build", version],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
