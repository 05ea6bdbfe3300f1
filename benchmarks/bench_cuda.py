"""Costs and rates of managed memory on a GPU, next to the predictions.

Sets a limit of 8 GiB before its first managed allocation and refuses to start unless each card has that and
6 GiB free: managed memory beyond a card's free memory can hang it. Takes a few minutes.

    python benchmarks/bench_cuda.py [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _cuda_networks import BATCHES, NETWORKS, make_step
from _cuda_timing import device_seconds
from _environment import RESULTS, ROOT, describe
from _results import write_results

import torch_uvm
from torch_uvm import _C

sys.path.insert(0, str(ROOT / "tests"))
from _cuda_allocation import allocation
from _cuda_moves import copy_out, first_touch, in_place, moves, plain_copies, small_moves
from _cuda_rows import Row, Section, clean, scope
from _gpu_guard import GIB, Guard, Refused, check_room

LIMIT = 8 * GIB


def training() -> list[Row]:
    """Steps that fit on the device, with the switch on and off, and runtime allocations per steady step."""
    rows = []
    for name, (make, repetitions) in NETWORKS.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        steps = {on: make_step(make, BATCHES[name], scope(on)) for on in (False, True)}
        for on, step in steps.items():
            with scope(on):
                for _ in range(3):
                    step()
        calls = _C.memory_stats(None)["num_device_alloc"], torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(repetitions):
            for on, step in steps.items():
                with scope(on):
                    seconds[on].append(device_seconds(step, None, repetitions=1))
        made = _C.memory_stats(None)["num_device_alloc"], torch.cuda.memory_stats()["num_device_alloc"]
        off, on_ = (sorted(seconds[on])[repetitions // 2] for on in (False, True))
        rows += [
            Row(f"step of {name}, off", off * 1e3, "ms"),
            Row(f"step of {name}, on", on_ * 1e3, "ms"),
            Row(f"step of {name}, on / off", on_ / off, "", "<= 1.02"),
            Row(f"runtime allocations in its steady steps, {name}", made[1] - calls[1], "", "0", "0"),
            Row(f"of these, managed, {name}", made[0] - calls[0], "", "0", "0"),
        ]
        del steps
        clean()
    return rows


SECTIONS: dict[str, Section] = {
    "allocation": allocation,
    "moves": moves,
    "calls of moves": small_moves,
    "plain copies": plain_copies,
    "copies out": copy_out,
    "first touch": first_touch,
    "in place": in_place,
    "training": training,
}


def device_description() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        driver = done.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "device_memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def run(only: str, document: dict[str, Any], write: Callable[[], None]) -> bool:
    """Runs every section and writes the results after each. Returns False if a section failed."""
    fine = True
    for name, section in SECTIONS.items():
        if only not in name:
            continue
        print(f"\n{name}")
        try:
            rows = section()
        except Exception as error:
            fine = False
            document["failures"][name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
        else:
            document["figures"][name] = [asdict(row) for row in rows]
            for row in rows:
                value = f"{row.value:,.0f}" if row.unit == "ns" else f"{row.value:,.3g}"
                print(f"  {row.name:58}{value:>10} {row.unit:5}{row.goal:>9}{row.predicted:>15}", flush=True)
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
    target = args.json or (
        Path(os.environ["OUT"]) / "cuda.json" if "OUT" in os.environ else RESULTS / "cuda.json"
    )
    if _C.backend() != "cuda" or not torch.cuda.is_available():
        sys.exit("bench_cuda.py needs a GPU and a torch_uvm with its CUDA layer")
    try:
        room = check_room(LIMIT)
        guard = Guard(LIMIT).hold()
    except Refused as error:
        sys.exit(f"not safe to run: {error}")
    torch_uvm.ones(1)  # creates the runtime and installs the allocator

    environment = describe(["python", "benchmarks/bench_cuda.py", *sys.argv[1:]]) | device_description()
    environment |= {"limit": LIMIT, "free_at_start": room}
    document: dict[str, Any] = {"environment": environment, "figures": {}, "failures": {}}

    def write() -> None:
        document["peak_managed_bytes"] = _C.peak_managed_bytes()
        write_results(target, document)

    print(f"{environment['device']}, CUDA {environment['cuda']}, torch {environment['torch']}")
    print(f"  {'':58}{'measured':>10}      {'goal':>9}{'predicted':>15}")
    fine = run(args.only, document, write)
    guard.check()
    print(f"\nFigures are in {target}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
