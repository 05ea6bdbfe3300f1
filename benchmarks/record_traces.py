"""Records timed traces of training workloads on a GPU: for schedules, predictions and bounds on any machine.

    python benchmarks/record_traces.py [--only TEXT]... [--out benchmarks/traces]

Every workload runs in processes of its own, one that updates in place and one that defers updates, if it
updates anything, under a budget that it fits in. The limit is what the card has free less 6 GiB, which has to
be 8 GiB; the budget is 1 GiB less. Writes NAME.jsonl.xz and NAME_deferred.jsonl.xz, and
index.json with the step's time in core and its peak. Steps are recorded while the host is at full speed
(_host_speed.py), if it is in one of six tries: `calm` in index.json.

--rehearse records the small workloads on the emulated accelerator, to test the script.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _residency_limits import GIB, LIMIT, MARGIN

WARM, MEASURED, RECORDED = 6, 8, 6  # steps
TRIES = 6  # at most, until the host is at full speed


def file_name(workload: str, optimizer: str) -> str:
    suffix = "_deferred" if optimizer == "deferred" else ""
    return workload.replace(", ", "_").replace(" ", "_") + suffix + ".jsonl.xz"


def record(workload: str, optimizer: str, out: Path, small: bool) -> dict[str, Any]:
    """Runs in the process of its own. Returns what the index says of the trace."""
    import torch
    from _host_speed import HostSpeed
    from _workloads import make

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
    torch_uvm.reset_peak_memory_stats()
    host = HostSpeed()
    for _ in range(TRIES):
        with host.watch() as watched:
            times = [step() for _ in range(MEASURED)]
        if watched.calm:
            break
    peak = torch_uvm.max_memory_allocated()
    over = torch_uvm.residency_stats()["over_budget"]
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace"
        for _ in range(TRIES):
            with host.watch() as watched, torch_uvm.record_accesses(plain):
                for _ in range(RECORDED):
                    step()
            if watched.calm:
                break
        (out / file_name(workload, optimizer)).write_bytes(lzma.compress(plain.read_bytes(), preset=9))
    if over:
        raise SystemExit(f"{workload} does not fit into the budget")
    name = "emulated" if small else torch.cuda.get_device_name()
    return {
        "file": file_name(workload, optimizer),
        "step_ms": round(statistics.median(times), 3),
        "peak_bytes": peak,
        "device": name,
        "torch": torch.__version__,
        "calm": watched.calm,
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
    from _workloads import WORKLOADS

    arguments.out.mkdir(parents=True, exist_ok=True)
    index_file = arguments.out / "index.json"
    index = json.loads(index_file.read_text()) if index_file.exists() else {}
    environment = {**os.environ, "TORCH_UVM_CONF": f"limit:{LIMIT}"}
    if arguments.rehearse:
        environment |= {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": "limit:256MiB"}
    failed = 0
    for workload in WORKLOADS:
        if workload == "16k tokens" or not any(text in workload for text in arguments.only or [""]):
            continue  # 16k tokens need 16 GiB
        for optimizer in ("in_place",) if workload == "decoding" else ("in_place", "deferred"):
            command = [sys.executable, __file__, "--workload", workload, "--optimizer", optimizer]
            command += ["--out", str(arguments.out), *(["--rehearse"] if arguments.rehearse else [])]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
