"""Costs and rates of managed memory on a GPU.

Sets a limit of 8 GiB before its first managed allocation and refuses to start unless each card has that and
6 GiB free: managed memory beyond a card's free memory can hang it. Takes a few minutes.

    python benchmarks/bench_cuda.py [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _cuda_sections import SECTIONS, clean
from _results import RESULTS, ROOT, describe, device_description, write_results

import torch_uvm
from torch_uvm import _C

sys.path.insert(0, str(ROOT / "tests"))
from _gpu_guard import GIB, Guard, Refused, check_room

LIMIT = 8 * GIB


def run(only: str, document: dict[str, Any], write: Callable[[], None]) -> bool:
    """Runs every section and writes the results after each. Returns False if a section failed."""
    fine = True
    for name, section in SECTIONS.items():
        if only not in name:
            continue
        print(f"\n{name}")
        rows = document["figures"].setdefault(name, [])
        try:
            for row in section():
                rows.append(asdict(row))
                value = f"{row.value:,.0f}" if row.unit == "ns" else f"{row.value:,.3g}"
                print(f"  {row.name:58}{value:>10} {row.unit:5}{row.goal:>9}", flush=True)
        except Exception as error:
            fine = False
            document["failures"][name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
        finally:
            torch_uvm.disable()
            clean()
            write()
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--only", default="", metavar="TEXT", help="only sections whose name contains it")
    args = parser.parse_args()
    target = args.json or Path(os.environ.get("OUT", RESULTS)) / "cuda.json"
    if _C.backend() != "cuda" or not torch.cuda.is_available():
        sys.exit("bench_cuda.py needs a GPU and a torch_uvm with its CUDA layer")
    try:
        room = check_room(LIMIT)
        guard = Guard(LIMIT).hold()
    except Refused as error:
        sys.exit(f"not safe to run: {error}")
    torch_uvm.memory.ones(1)  # creates the runtime and installs the allocator
    environment = describe(["python", "benchmarks/bench_cuda.py", *sys.argv[1:]]) | device_description()
    environment |= {"cuda": torch.version.cuda, "limit": LIMIT, "free_at_start": room}
    document: dict[str, Any] = {"environment": environment, "figures": {}, "failures": {}}

    def write() -> None:
        document["peak_managed_bytes"] = _C.peak_managed_bytes()
        write_results(target, document)

    print(f"{environment['device']}, CUDA {environment['cuda']}, torch {environment['torch']}")
    print(f"  {'':58}{'measured':>10}      {'goal':>9}")
    fine = run(args.only, document, write)
    guard.check()
    print(f"\nFigures are in {target}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
