"""Records timed traces of training workloads on a GPU: for schedules, predictions and bounds on any machine.

    python benchmarks/record_traces.py [--only TEXT]... [--out benchmarks/traces]

Every workload runs in processes of its own, one that updates in place and one that defers updates, if it
updates anything, under a budget that it fits in. The limit is what the card has free less 6 GiB, which has to
be 8 GiB; the budget is 1 GiB less. Writes NAME.jsonl.xz and NAME_deferred.jsonl.xz, and index.json with the
step's time in core and its peak.

--rehearse records the small workloads on the emulated accelerator, to test the script.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _runs import GIB, LIMIT, MARGIN, environment, python
from _workloads import WORKLOADS, make

WARM, MEASURED, RECORDED = 6, 8, 6  # steps
IN_PLACE_ONLY = ("decoding", "LoRA")  # nothing is updated, or nearly nothing
TOO_LARGE = "16k tokens"  # 16 GiB


def file_name(workload: str, optimizer: str) -> str:
    suffix = "_deferred" if optimizer == "deferred" else ""
    return workload.replace(", ", "_").replace(" ", "_") + suffix + ".jsonl.xz"


def packed(text: str) -> bytes:
    """A trace, compressed. Whole microseconds suffice for the times of operators."""
    text = re.sub(r'(?<="time": )(\d+)\.\d+(?=, "in_place_ok")', r"\1", text)
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def record(workload: str, optimizer: str, out: Path, small: bool) -> dict[str, Any]:
    """Runs in the process of its own. Returns what the index says of the trace."""
    import torch

    import torch_uvm
    from torch_uvm import _C

    device = torch.device("emu" if small else "cuda")
    # As the benchmark's processes do: the durations of some operators depend on it.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not small:
        limit = (torch.cuda.mem_get_info()[0] - MARGIN) // GIB * GIB
        if limit < LIMIT:
            raise SystemExit(f"the card has less than {(LIMIT + MARGIN) / GIB:.0f} GiB free")
        _C.set_limit(limit)
    torch_uvm.enable(budget="96MiB" if small else limit - GIB, optimizer=optimizer)
    made = make(workload, device, small)
    updates = made.optimizer(made.trained())

    def step() -> float:
        begin = time.perf_counter()
        made.step(updates)
        torch.accelerator.synchronize()
        return (time.perf_counter() - begin) * 1e3

    for _ in range(WARM):
        step()
    torch_uvm.memory.reset_peak_memory_stats()
    times = [step() for _ in range(MEASURED)]
    peak = torch_uvm.memory.max_memory_allocated()
    over = torch_uvm.stats()["over_budget"]
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace"
        with torch_uvm.tools.record_accesses(plain):
            for _ in range(RECORDED):
                step()
        (out / file_name(workload, optimizer)).write_bytes(packed(plain.read_text()))
    if over:
        raise SystemExit(f"{workload} does not fit into the budget")
    return {
        "file": file_name(workload, optimizer),
        "step_ms": round(statistics.median(times), 3),
        "peak_bytes": peak,
        "device": "emulated" if small else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Records timed traces.", allow_abbrev=False)
    parser.add_argument("--only", action="append", metavar="TEXT", help="workloads with this in their name")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "traces")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--workload", help=argparse.SUPPRESS)  # in the process of its own
    parser.add_argument("--optimizer", default="in_place", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workload is not None:
        row = record(arguments.workload, arguments.optimizer, arguments.out, arguments.rehearse)
        print(json.dumps(row))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    index_file = arguments.out / "index.json"
    index = json.loads(index_file.read_text()) if index_file.exists() else {}
    variables = environment() | {"TORCH_UVM_CONF": f"limit:{LIMIT}"}
    if arguments.rehearse:
        variables |= {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": "limit:256MiB"}
    failed = 0
    for workload in WORKLOADS:
        if workload == TOO_LARGE or not any(text in workload for text in arguments.only or [""]):
            continue
        for optimizer in ("in_place",) if workload in IN_PLACE_ONLY else ("in_place", "deferred"):
            words = [__file__, "--workload", workload, "--optimizer", optimizer, "--out", arguments.out]
            command = python(*words, *(["--rehearse"] if arguments.rehearse else []))
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(f"{workload}, {optimizer}: {done.stderr.strip().splitlines()[-1:]}")
                failed = 1
                continue
            index.setdefault(workload, {})[optimizer] = json.loads(done.stdout.splitlines()[-1])
            print(f"{workload}, {optimizer}: {index[workload][optimizer]}")
            index_file.write_text(json.dumps(index, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
