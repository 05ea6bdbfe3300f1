"""Runs programs of `_races.py` with the whole extension built under a sanitizer.

    python tests/_sanitized.py thread [--seconds S] [NAME ...]
    python tests/_sanitized.py address [--seconds S] [NAME ...]

`make sanitize-extension` makes the builds. Python and torch are not instrumented, so the sanitizer's library
is preloaded. First the build must report a planted fault, to show that the sanitizer works. Exit status 1: a
fault, or a wrong value. Reports go to stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
ADDR_NO_RANDOMIZE = 0x0040000  # from <sys/personality.h>


class Sanitizer(NamedTuple):
    library: str
    variable: str
    options: str
    planted: str
    """A function of `_C`, in these builds only (tests/cpp/doubles/test_bindings.cpp)."""
    report: str
    """What is said of it."""


SANITIZERS = {
    # No leak check: the engine, allocators and storage adapter are leaked on purpose, and Python leaks too.
    "address": Sanitizer(
        "libasan.so",
        "ASAN_OPTIONS",
        "detect_leaks=0:halt_on_error=1",
        "planted_use_after_free",
        "heap-use-after-free",
    ),
    # Programs run in forked children, which start threads.
    "thread": Sanitizer(
        "libtsan.so",
        "TSAN_OPTIONS",
        f"halt_on_error=1:die_after_fork=0:history_size=4:suppressions={TESTS / 'tsan_suppressions.txt'}",
        "planted_race",
        "data race",
    ),
}


def library(name: str) -> str:
    """The path of the compiler's sanitizer library."""
    compiler = os.environ.get("CXX", "c++")
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"{compiler} has no {name}")
    return path


def keep_addresses() -> None:
    """TSAN needs its shadow addresses, where the kernel of some machines places libraries at random."""
    if ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE) == -1:
        print("addresses stay random: TSAN may end with 'unexpected memory mapping'", file=sys.stderr)


def run(
    kind: str, build: Path, arguments: list[str], capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs Python on the build: `python arguments...`."""
    it = SANITIZERS[kind]
    environment = {
        **os.environ,
        # Preloads the C++ library too: ASAN looks up __cxa_throw at the start, before Python has loaded it.
        "LD_PRELOAD": f"{library(it.library)} {library('libstdc++.so.6')}",
        it.variable: ":".join(filter(None, [it.options, os.environ.get(it.variable)])),
        "PYTHONPATH": str(build),
        "TORCH_UVM_DEVICE": "emu",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=build,
        env=environment,
        capture_output=capture,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=keep_addresses,
    )


def finds_what_is_planted(kind: str, build: Path) -> bool:
    it = SANITIZERS[kind]
    code = f"import torch, torch_uvm; torch_uvm._C.{it.planted}()"
    done = run(kind, build, ["-c", code], capture=True)
    if done.returncode != 0 and it.report in done.stderr and it.planted in done.stderr:
        return True
    print(f"{it.planted}() was not reported: {done.stdout}\n{done.stderr}", file=sys.stderr)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=SANITIZERS)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if not said")
    parser.add_argument("--seconds", metavar="S", help="for each program; its seeds, if not said")
    options = parser.parse_intermixed_args()
    build = TESTS.parent / "build" / f"sanitized-{options.kind}"
    if not build.exists():
        sys.exit(f"{build} is not there; `make sanitize-extension` builds it")
    if not finds_what_is_planted(options.kind, build):
        return 1
    seconds = ["--seconds", options.seconds] if options.seconds else []
    races = [str(TESTS / "_races.py"), "--threads", *seconds, *options.names]
    return run(options.kind, build, races).returncode


if __name__ == "__main__":
    sys.exit(main())
