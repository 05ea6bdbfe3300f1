"""Training with less device memory than it takes, on the emulated accelerator, in modelled time.

The table is about bytes, hits and equality. Modelled times only reflect the cost profile of `emu`, which
counts memory traffic and no arithmetic. Each row runs in a fresh process; the whole takes well under a minute
and needs no GPU.

    python benchmarks/bench_residency_emulated.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _environment import RESULTS, describe
from _residency_processes import environment
from _results import write_results
from lower_bound import least_traffic

MIB = 1024**2
AMPLE = 2048 * MIB
PARTS = ("1/1.5", "1/2", "1/4")
WARM_UP, STEPS, RECORDED = 4, 2, 4
DRIVER, ENGINE, AUTO = "driver's faults", "engine", "engine, auto"
ROOMY = "1/0.75"  # a device with 1/0.75 of the peak; a batch of four times the usual size exceeds it


@dataclass
class Row:
    """Averages over a run's steady steps. Bytes and times are modelled."""

    name: str
    part: str  # share of the peak that the device has as memory
    memory: int  # of the device, bytes
    budget: int | str | None
    bytes_in: float  # to the device: migrated and copied
    bytes_out: float
    in_place: float  # bytes used across the link
    faults: float  # pages
    evicted: float  # pages
    hits: float | None  # share of operators that matched the schedule; None without the engine
    misses: float | None
    modelled_ms: float
    peak_resident: int  # maximum of managed bytes on the device, over all steps
    peak_allocated: int  # maximum of managed bytes in use, over all steps
    losses: list[str] = field(repr=False)  # one per step, in hexadecimal
    equal: bool = True  # whether all losses equal those without a budget, to the last bit
    trace: str | None = None  # path of the recorded accesses, if any
    least_in: float | None = None  # lower bound per step of bytes fetched, or read across the link
    least_out: float | None = None  # bytes per step written back by a schedule that reaches least_in
    after_spike_ms: float | None = None  # modelled_ms after one batch of four times the usual size


def child(spec: dict[str, Any]) -> Row:
    """Trains in this process, which has not used the emulated accelerator yet."""
    import torch
    from _residency_workloads import SEED, TransformerOf

    import torch_uvm
    from torch_uvm import _C

    torch.set_num_threads(1)  # before the first backward, whose threads read it once
    torch_uvm.emulated.configure(memory=spec["memory"])
    torch_uvm.enable(budget=spec["budget"], limit=AMPLE, optimizer="in_place")
    torch.manual_seed(SEED)
    device = torch.device("emu")
    with torch.device(device):
        made = TransformerOf(2, 128, depth=4, width=384, heads=6, dtype=torch.float32).make(device)
    optimizer = made.optimizer(made.trained())
    losses = []

    def step(batch: tuple[torch.Tensor, ...] = made.batch) -> None:
        loss = made.loss(made.model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    def statistics() -> dict[str, Any]:
        found: dict[str, Any] = {} if spec["budget"] is None else bindings.residency_stats()
        return found

    def steady_ms() -> float:
        begin = torch_uvm.emulated.time_us()
        for _ in range(STEPS):
            step()
        return (torch_uvm.emulated.time_us() - begin) / 1e3 / STEPS

    bindings: Any = _C
    for _ in range(WARM_UP):
        step()
    peak_before = torch_uvm.emulated.max_resident_bytes()
    torch_uvm.emulated.reset_counters()
    before = statistics()
    modelled = steady_ms()
    counted, after = torch_uvm.emulated.counters(), statistics()
    peak = max(peak_before, torch_uvm.emulated.max_resident_bytes())
    values = [float(loss.item()).hex() for loss in losses]
    after_spike = None
    if spec["name"] == AUTO:
        step(tuple(torch.cat([part] * 4) for part in made.batch))
        for _ in range(WARM_UP):
            step()
        after_spike = steady_ms()
    if spec["trace"] is not None:
        bindings.start_recording_accesses(spec["trace"])
        for _ in range(RECORDED):
            step()  # its optimizer marks the end of the step
        bindings.stop_recording_accesses()

    def planned(figure: str) -> float | None:
        return (after[figure] - before[figure]) / STEPS if after else None

    return Row(
        name=spec["name"],
        part=spec["part"],
        memory=spec["memory"],
        budget=spec["budget"],
        bytes_in=(counted["bytes_to_device"] + counted["bytes_copied_to_device"]) / STEPS,
        bytes_out=(counted["bytes_to_host"] + counted["bytes_copied_to_host"]) / STEPS,
        in_place=counted["bytes_in_place"] / STEPS,
        faults=(counted["faults_on_device"] + counted["faults_on_host"]) / STEPS,
        evicted=counted["evicted_pages"] / STEPS,
        hits=planned("plan_hits"),
        misses=planned("plan_misses"),
        modelled_ms=modelled,
        peak_resident=peak,
        peak_allocated=torch_uvm.max_memory_allocated(),
        losses=values,
        trace=spec["trace"],
        after_spike_ms=after_spike,
    )


def run(name: str, part: str, memory: int, budget: int | str | None, trace: str | None = None) -> Row:
    """Makes a row in a process of its own.

    Raises:
        RuntimeError: the process failed. The message contains the end of its output.
    """
    variables = environment(rehearsal=True, imports_torch_uvm=True) | {"OMP_NUM_THREADS": "1"}
    spec = {"name": name, "part": part, "memory": memory, "budget": budget, "trace": trace}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(spec)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} at {part} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def part_of(peak: int, part: str) -> int:
    """Rounds to whole pages of 2 MiB."""
    count = int(peak / float(part.removeprefix("1/")))
    return count - count % (2 * MIB)


def rows(parts: Sequence[str] = PARTS, *, engine: bool = True, folder: str | None = None) -> list[Row]:
    """The rows of the table. First, without a budget and with enough memory. Then, for each share of the
    peak, two rows on a device with that much memory: page faults by the driver, and the engine with that
    budget. Last, the engine with budget="auto" on a device that fits the usual batch but not one of four
    times its size.

    engine: whether to make the engine's rows
    folder: where to write a trace of some steps for each engine row; None: no traces and no lower bounds

    Raises:
        RuntimeError: a run failed.
    """
    plain = run("no budget, all fits", "1", AMPLE, None)
    wanted = [(DRIVER, part) for part in parts]
    if engine:
        wanted += [*((ENGINE, part) for part in parts), (AUTO, ROOMY)]

    def one(name: str, part: str) -> Row:
        memory = part_of(plain.peak_allocated, part)
        budget = {DRIVER: None, ENGINE: memory, AUTO: "auto"}[name]
        trace = str(Path(folder) / f"{part[2:]}.trace") if folder is not None and name == ENGINE else None
        return run(name, part, memory, budget, trace)

    # modelled figures do not depend on the machine's load
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = [plain, *pool.map(lambda each: one(*each), wanted)]
    for row in found:
        row.equal = row.losses == plain.losses
        if row.trace is not None:
            row.least_in, row.least_out = least_traffic(Path(row.trace), row.memory)
    return found


def format_rows(found: Sequence[Row]) -> str:
    lines = [
        f"{'':24}{'memory':>9}{'peak':>9}{'in':>9}{'out':>9}{'in place':>9}{'least in':>9}{'and out':>9}"
        f"{'faults':>8}{'evicted':>8}"
        f"{'hits':>7}{'misses':>7}{'modelled':>10}{'after 4x':>10}  losses",
        f"{'':24}" + f"{'MiB':>9}" * 7 + f"{'pages':>8}{'pages':>8}{'':14}{'ms':>10}{'ms':>10}",
    ]

    def mib(count: float | None) -> str:
        return f"{'-' if count is None else f'{count / MIB:.1f}':>9}"

    def whole(count: float | None, width: int) -> str:
        return f"{'-' if count is None else f'{count:.0f}':>{width}}"

    for row in found:
        moved = (row.bytes_in, row.bytes_out, row.in_place, row.least_in, row.least_out)
        sizes = (row.memory, row.peak_resident, *moved)
        lines.append(
            f"{row.name + ('' if row.part == '1' else ', ' + row.part):24}"
            + "".join(map(mib, sizes))
            + whole(row.faults, 8)
            + whole(row.evicted, 8)
            + whole(row.hits, 7)
            + whole(row.misses, 7)
            + f"{row.modelled_ms:>10.2f}"
            + ("-".rjust(10) if row.after_spike_ms is None else f"{row.after_spike_ms:>10.2f}")
            + f"  {'equal' if row.equal else 'NOT EQUAL'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--child", metavar="SPEC", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(asdict(child(json.loads(args.child)))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = rows(folder=folder)
    print("A step of a small transformer; figures of the emulated accelerator, modelled.\n")
    print(format_rows(found))
    document = {
        "environment": describe(["python", "benchmarks/bench_residency_emulated.py", *sys.argv[1:]]),
        "rows": [{key: value for key, value in asdict(row).items() if key != "trace"} for row in found],
    }
    target = args.json or RESULTS / "residency_emulated.json"
    write_results(target, document)
    return 0 if all(row.equal for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
