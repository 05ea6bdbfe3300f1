"""Files of results: the machine and versions of a measurement, and JSON with one row a line.

One row a line makes a new measurement a short diff. Numbers have six digits.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def describe(command: list[str]) -> dict[str, Any]:
    """The machine, the versions and the command line, as plain data."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": shlex.join(command),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_description() -> dict[str, str]:
    """Name, driver and memory of the first card, by nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        name, driver, memory = (part.strip() for part in done.stdout.split("\n")[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"device": "unknown"}
    return {"device": name, "driver": driver, "device_memory": memory}


def commit() -> str:
    """The measured commit, with "+" if the sources have local changes; "unknown" outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        sources = ("csrc", "torch_uvm", "benchmarks/cpp")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        print("benchmarks: not a git checkout; the commit is recorded as unknown", file=sys.stderr)
        return "unknown"


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document of results. Creates its folder if necessary.

    Raises:
        OSError: the file cannot be written.
        TypeError: the document holds something that JSON does not have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(one_row_a_line(rounded(document)) + "\n")


def rounded(value: Any) -> Any:
    """The value with floats of six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def one_row_a_line(value: Any, indent: int = 0) -> str:
    """JSON with each row on one line, however long.

    Rows are the elements of a list of objects and the members of an object of objects. A container of rows
    has one line per member; everything else is on one line.
    """
    inner = " " * (indent + 1)
    if isinstance(value, list) and _contains_rows(value):
        return "[\n" + ",\n".join(inner + json.dumps(row) for row in value) + "\n" + " " * indent + "]"
    if isinstance(value, Mapping) and _contains_rows(value):
        members = (f"{json.dumps(key)}: {one_row_a_line(value[key], indent + 1)}" for key in value)
        return "{\n" + ",\n".join(inner + member for member in members) + "\n" + " " * indent + "}"
    return json.dumps(value)


def _contains_rows(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(each, Mapping) for each in value)
    if isinstance(value, Mapping) and value:
        members = value.values()
        return all(isinstance(each, Mapping) for each in members) or any(map(_contains_rows, members))
    return False
