"""Builds and runs the benchmarks that need no GPU, and writes their figures to benchmarks/results/.

python benchmarks/run.py [allocator] [operators]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _results import RESULTS, ROOT, describe, write_results

PARTS = ("allocator", "plan")


def run(*command: str) -> None:
    """Runs a command in the root of the repository, finding tools of this Python's environment first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, check=True)


def allocator() -> None:
    """Allocations and frees in C++, without torch: the cost of a call, of ragged sizes, and of plans."""
    build = ROOT / "build" / "cpp"
    run("cmake", "-S", "tests/cpp", "-B", str(build), "-G", "Ninja", "--log-level=WARNING")
    targets = [f"bench_{part}" for part in PARTS]
    run("cmake", "--build", str(build), "--target", *targets, "-j", str(os.cpu_count() or 1), "--", "--quiet")
    document = {"environment": describe(["build/cpp/bench_{" + ",".join(PARTS) + "}", "FILE"])}
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:
            figures = Path(folder) / f"{target}.json"
            run(str(build / target), str(figures))
            document |= json.loads(figures.read_text())
    write_results(RESULTS / "allocator.json", document)


def operators() -> None:
    """Operators on the emulated accelerator against the CPU."""
    run(sys.executable, "benchmarks/bench_operators.py", "--json", "benchmarks/results/operators.json")


BENCHMARKS = {"allocator": allocator, "operators": operators}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" or ".join(BENCHMARKS))
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    try:
        for name in args.names or BENCHMARKS:
            BENCHMARKS[name]()
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is needed and was not found")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    print(f"\nFigures are in {RESULTS.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
