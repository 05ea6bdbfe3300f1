"""Builds and runs the benchmarks, prints their tables, and writes the figures to benchmarks/results/.

python benchmarks/run.py [allocator] [operators] [replay] [residency]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _environment import RESULTS, ROOT, describe
from _results import write_results


def run(*command: str) -> None:
    """Runs a command in the root of the repository, finding tools of this Python's environment first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, check=True)


def allocator(build: Path) -> None:
    """Allocations and frees in C++, without torch: the cost of a call, of ragged sizes, and of events."""
    parts = ("allocator", "ragged", "events", "arena", "plan")
    run("cmake", "-S", "tests/cpp", "-B", str(build), "-G", "Ninja", "--log-level=WARNING")
    run(
        "cmake",
        "--build",
        str(build),
        "--target",
        *(f"bench_{part}" for part in parts),
        "-j",
        str(os.cpu_count() or 1),
        "--",
        "--quiet",
    )
    document = {"environment": describe(["build/cpp/bench_{" + ",".join(parts) + "}", "--json", "FILE"])}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            figures = Path(folder) / f"{part}.json"
            run(str(build / f"bench_{part}"), "--json", str(figures))
            document[part] = json.loads(figures.read_text())
    write_results(RESULTS / "allocator.json", document)


def operators(build: Path) -> None:
    """Operators on the emulated accelerator against the CPU."""
    run(
        sys.executable,
        "benchmarks/bench_operators.py",
        "--json",
        str(RESULTS.relative_to(ROOT) / "operators.json"),
    )


def residency(build: Path) -> None:
    """Training under a budget on the emulated accelerator, in modelled time."""
    run(
        sys.executable,
        "benchmarks/bench_residency_emulated.py",
        "--json",
        str(RESULTS.relative_to(ROOT) / "residency_emulated.json"),
    )


def replay(build: Path) -> None:
    """The recorded logs of allocations on each of our allocators."""
    command = ["-m", "torch_uvm", "replay", "--repeat", "20", "--json"]
    document = {"environment": describe(["python", *command, "FILE", "benchmarks/logs/LOG.csv"]), "logs": {}}
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "replay.json"
        for log in sorted((ROOT / "benchmarks" / "logs").glob("*.csv")):
            run(sys.executable, *command, str(figures), str(log.relative_to(ROOT)))
            document["logs"][log.stem] = json.loads(figures.read_text())
    write_results(RESULTS / "replay.json", document)


BENCHMARKS = {"allocator": allocator, "operators": operators, "replay": replay, "residency": residency}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{' or '.join(BENCHMARKS)}; without it: all"
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cpp", help="folder for the C++ build")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    try:
        for name in args.names or BENCHMARKS:
            BENCHMARKS[name](args.build.resolve())
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is needed and was not found")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    print(f"\nFigures are in {RESULTS.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
