"""Records timed traces of training workloads on a GPU: for schedules, predictions and bounds on any machine.

    python benchmarks/record_traces.py [--only TEXT] [--out benchmarks/traces]

Every workload runs in processes of its own, one that updates in place and one that defers updates, under a
budget of 12 GiB that it fits in, which is the process's limit too. It refuses to start unless the card has
eight times that free. Writes NAME.jsonl.xz and NAME_deferred.jsonl.xz, and index.json with the step's time in
core and its peak.

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

GIB = 1 << 30
LIMIT = 12 * GIB
ROOM = 8
WARM, MEASURED, RECORDED = 6, 8, 4  # steps


def file_name(workload: str, optimizer: str) -> str:
    suffix = "_deferred" if optimizer == "deferred" else ""
    return workload.replace(", ", "_").replace(" ", "_") + suffix + ".jsonl.xz"


def record(workload: str, optimizer: str, out: Path, small: bool) -> dict[str, Any]:
    """Runs in the process of its own. Returns what the index says of the trace."""
    import _residency_workloads
    import _schedule_workloads
    import torch

    import torch_uvm

    device = torch.device("emu" if small else "cuda")
    if not small:
        free = torch.cuda.mem_get_info()[0]
        if free < ROOM * LIMIT:
            raise SystemExit(f"the card has {free / GIB:.1f} GiB free; {ROOM * LIMIT / GIB:.0f} are needed")
    torch_uvm.enable(budget="96MiB" if small else LIMIT - GIB, optimizer=optimizer)
    modules: list[Any] = [_residency_workloads, _schedule_workloads]
    makers = [module.SMALL if small else module.WORKLOADS for module in modules]
    maker = (makers[0] | makers[1])[workload]
    torch.manual_seed(0)
    with torch.device(device):
        made = maker.make(device)
    updates = made.optimizer(made.trained())

    def step() -> float:
        begin = time.perf_counter()
        made.loss(made.model, made.batch).backward()
        updates.step()
        updates.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()
        return (time.perf_counter() - begin) * 1e3

    for _ in range(WARM):
        step()
    torch_uvm.reset_peak_memory_stats()
    times = [step() for _ in range(MEASURED)]
    peak = torch_uvm.max_memory_allocated()
    over = torch_uvm.residency_stats()["over_budget"]
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace"
        with torch_uvm.record_accesses(plain):
            for _ in range(RECORDED):
                step()
        (out / file_name(workload, optimizer)).write_bytes(lzma.compress(plain.read_bytes(), preset=9))
    if over:
        raise SystemExit(f"{workload} does not fit into {LIMIT / GIB:.0f} GiB")
    name = "emulated" if small else torch.cuda.get_device_name()
    return {
        "file": file_name(workload, optimizer),
        "step_ms": round(statistics.median(times), 3),
        "peak_bytes": peak,
        "device": name,
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Records timed traces.", allow_abbrev=False)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "traces")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--workload", help=argparse.SUPPRESS)  # in the process of its own
    parser.add_argument("--optimizer", default="in_place", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workload is not None:
        row = record(arguments.workload, arguments.optimizer, arguments.out, arguments.rehearse)
        print(json.dumps(row))
        return 0
    import _residency_workloads
    import _schedule_workloads

    arguments.out.mkdir(parents=True, exist_ok=True)
    index_file = arguments.out / "index.json"
    index = json.loads(index_file.read_text()) if index_file.exists() else {}
    environment = {**os.environ, "TORCH_UVM_CONF": f"limit:{LIMIT}"}
    if arguments.rehearse:
        environment |= {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": "limit:256MiB"}
    failed = 0
    for workload in [*_residency_workloads.WORKLOADS, *_schedule_workloads.WORKLOADS]:
        if arguments.only not in workload or workload == "16k tokens":  # it needs 16 GiB
            continue
        for optimizer in ("in_place", "deferred"):
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
