"""Steps of a compiled model at a budget that they fit in, beside the same steps without torch_uvm.

    python benchmarks/compiled_steps.py [--json FILE] [--modes default,reduce-overhead] [--seconds 220]

For a GPU. A causal language model of 0.22 G parameters is compiled by Inductor, and trained in processes of
its own: native (torch_uvm is not imported), managed memory without a budget, and a budget of 7 GiB. Under the
budget steps are measured twice: while the engine watches operators, and once it is idle. For each the table
has the time of a step on the device, the host's time to queue it, the operators that the engine saw in it,
and the calls of CUDA's runtime that it made; below it, which calls and kernels a step has more than a native
one.

Then calls of a graph alone, without kernels: the host's time per call by number of inputs. This part needs no
GPU: --calls runs nothing else, on the emulated accelerator where there is no GPU.

Every process has a limit of 8 GiB, and refuses to start unless the card has that and 6 GiB free.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _environment import describe
from _residency_limits import GIB, LIMIT, MARGIN
from _results import write_results

WORKLOADS = {"default": "language model, compiled", "reduce-overhead": "language model, CUDA graphs"}
COLUMNS = ("native", "no budget", "budget")
BUDGET = 7 * GIB
WARM_UP = 6  # steps: compilation, recording of CUDA graphs
STEPS, ROUNDS = 10, 3
PROFILED = 2  # steps
MOST_UNTIL_IDLE = 150  # steps
INPUTS = (10, 100, 300)
CALLS = 10  # in a row

Row = dict[str, Any]


# --- in a process of its own


def enable(column: str) -> Callable[[], int]:
    """Sets a column's state up. Returns how many operators the engine has seen."""
    if column == "native":
        assert "torch_uvm" not in sys.modules
        return lambda: 0
    import torch_uvm

    torch_uvm.set_limit(LIMIT)
    torch_uvm.enable(budget=BUDGET if column == "budget" else None)

    def seen() -> int:
        stats = torch_uvm.residency_stats()
        return int(stats["plan_hits"] + stats["plan_misses"])

    return seen


def measure(step: Callable[[], None], seen: Callable[[], int]) -> Row:
    """The fastest of some rounds of steps, each without synchronisation inside."""
    import torch

    found: Row = {}
    before = seen()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = []
        first.record()
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            host.append((time.perf_counter() - begin) * 1e3)
        last.record()
        torch.cuda.synchronize()
        found.setdefault("steps_ms", []).append(first.elapsed_time(last) / STEPS)
        found.setdefault("host_ms", []).append(statistics.median(host))
    found["operators_seen"] = (seen() - before) / (ROUNDS * STEPS)
    found["step_ms"] = min(found["steps_ms"])
    return found


def queue_alone(step: Callable[[], None]) -> float:
    """Milliseconds that the host takes to queue a step, with an idle device."""
    import torch

    took = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        took.append((time.perf_counter() - begin) * 1e3)
    return min(took)


def profile(step: Callable[[], None]) -> Row:
    """Kernels' and copies' time, and the count of each kind of runtime call and of kernel, per step."""
    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    calls: Counter[str] = Counter()
    calls_us: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    kernels_us = 0.0
    for event in events:
        kind = event.get("cat", "")
        if kind in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]] += 1
            calls_us[event["name"]] += event["dur"]
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[event["name"][:60]] += 1
            kernels_us += event["dur"]
    return {
        "device_busy_ms": kernels_us / 1e3 / PROFILED,
        "calls": {name: count / PROFILED for name, count in calls.most_common()},
        "calls_us": {name: us / PROFILED for name, us in calls_us.most_common()},
        "kernels": {name: count / PROFILED for name, count in kernels.most_common()},
    }


def train(column: str, mode: str) -> list[Row]:
    import torch
    from _workloads import make

    if torch.cuda.mem_get_info()[0] < LIMIT + MARGIN:
        raise SystemExit(f"not safe: the card has less than {(LIMIT + MARGIN) / GIB:.0f} GiB free")
    seen = enable(column)
    made = make(WORKLOADS[mode], torch.device("cuda"))
    optimizer = made.optimizer(made.trained())

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        made.step(optimizer)

    for _ in range(WARM_UP):
        step()
    rows: list[Row] = []

    def add(name: str) -> None:
        row = {"mode": mode, "column": name} | measure(step, seen)
        rows.append(row | {"queued_ms": queue_alone(step)} | profile(step))

    if column != "budget":
        add(column)
        return rows
    add("budget, watched")
    steps = 0
    while steps < MOST_UNTIL_IDLE:
        before = seen()
        step()
        steps += 1
        if seen() == before:
            break
    add("budget, idle" if steps < MOST_UNTIL_IDLE else "budget, later")
    already = WARM_UP + STEPS * (ROUNDS + 1) + PROFILED
    rows[-1]["idle_after_steps"] = already + steps if steps < MOST_UNTIL_IDLE else None
    import torch_uvm

    stats = torch_uvm.residency_stats()
    rows[-1]["moved_bytes"] = sum(stats[key]["bytes"] for key in ("fetched", "written_back", "used_in_place"))
    return rows


def calls() -> list[Row]:
    """Calls of a graph that does nothing, by number of inputs: the fastest of some rounds."""
    import torch

    import torch_uvm

    on_gpu = torch.cuda.is_available() and torch_uvm._C.backend() == "cuda"
    if on_gpu and torch.cuda.mem_get_info()[0] < LIMIT + MARGIN:
        raise SystemExit(f"not safe: the card has less than {(LIMIT + MARGIN) / GIB:.0f} GiB free")
    import torch._inductor.compile_fx  # all that a call of CompiledFxGraph needs
    from torch._inductor.output_code import CompiledFxGraph

    torch_uvm.set_limit(LIMIT if on_gpu else GIB)
    device = "cuda" if on_gpu else "emu"
    call = object.__new__(CompiledFxGraph)  # one that has no kernels and writes to no input
    call.current_callable = lambda inputs: ()
    call.compiled_fn_runner = None
    call.mutated_input_idxs = torch.utils._ordered_set.OrderedSet()
    call.fx_kwargs = {"is_backward": False}
    rows: list[Row] = []

    def time_of(name: str, inputs: list[torch.Tensor], rounds: int = 100) -> None:
        took = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(CALLS):
                call(inputs)
            took.append((time.perf_counter() - begin) / CALLS * 1e6)
        rows.append({"column": name, "inputs": len(inputs), "us": min(took)})

    for count in INPUTS:
        torch_uvm.set_budget(None)
        time_of("plain", [torch.ones(65536, device=device) for _ in range(count)])
        torch_uvm.enable(budget=None)
        inputs = [torch.ones(65536, device=device) for _ in range(count)]  # 256 KiB: the engine moves them
        time_of("no budget", inputs)
        torch_uvm.set_budget(LIMIT // 2 if on_gpu else "128MiB")
        time_of("watched", inputs, 10)  # 100 calls: too few for the engine to become idle
        for _ in range(1000):
            call(inputs)
        time_of("idle", inputs)
        torch_uvm.disable()
        del inputs
    return rows


# --- the table


def child(arguments: list[str], environment: dict[str, str], seconds: float) -> list[Row]:
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=max(seconds, 1)
        )
    except subprocess.TimeoutExpired:
        return [{"failed": f"no time left: {' '.join(arguments)}"}]
    if done.returncode:
        return [{"failed": f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1:]}"}]
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def show(rows: list[Row]) -> None:
    print(
        f"{'mode':<17}{'column':<18}{'step ms':>9}{'/native':>9}{'host ms':>9}{'queued':>8}{'busy':>8}",
        end="",
    )
    print(f"{'seen':>7}{'calls':>7}")
    native = {row["mode"]: row for row in rows if row.get("column") == "native"}
    for row in rows:
        if "failed" in row:
            print(row["failed"])
        elif "mode" in row:
            plain = native.get(row["mode"])
            ratio = f"{row['step_ms'] / plain['step_ms']:.3f}" if plain else "-"
            print(
                f"{row['mode']:<17}{row['column']:<18}{row['step_ms']:>9.2f}{ratio:>9}"
                f"{min(row['host_ms']):>9.2f}{row['queued_ms']:>8.2f}{row['device_busy_ms']:>8.2f}"
                f"{row['operators_seen']:>7.0f}{sum(row['calls'].values()):>7.0f}"
            )
    for row in rows:
        plain = native.get(row.get("mode", ""))
        if plain is None or row is plain:
            continue
        print(f"{row['mode']}, {row['column']}, more than native per step:")
        for kind in ("calls", "kernels"):
            names = {*row[kind], *plain[kind]}
            more = {name: row[kind].get(name, 0) - plain[kind].get(name, 0) for name in names}
            for name in sorted(more, key=lambda each: -abs(more[each]))[:6]:
                if more[name]:
                    print(f"  {more[name]:>+8.1f} {name}")
    columns = list(dict.fromkeys(row["column"] for row in rows if "inputs" in row))
    if columns:
        print("us a call of a graph without kernels, by inputs")
        print(f"{'inputs':>8}" + "".join(f"{name:>12}" for name in columns))
        for count in INPUTS:
            each = [row["us"] for row in rows if row.get("inputs") == count]
            print(f"{count:>8}" + "".join(f"{us:>12.2f}" for us in each))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--modes", default=",".join(WORKLOADS), help="of torch.compile")
    parser.add_argument("--seconds", type=float, default=220, help="for everything")
    parser.add_argument("--calls", action="store_true", help="only the calls of a graph alone")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        rows = calls() if arguments.child == ["calls"] else train(*arguments.child)
        print(json.dumps(rows))
        return 0
    deadline = time.monotonic() + arguments.seconds
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_UVM")}
        # Columns after the first take compiled kernels from the cache.
        environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        kept = os.environ.get("TORCH_UVM_DEVICE")
        environment |= {"TORCH_UVM_DEVICE": kept} if kept else {}
        path = [str(Path(__file__).resolve().parent.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        todo = [] if arguments.calls else [[c, m] for m in arguments.modes.split(",") for c in COLUMNS]
        about = describe(["python", "benchmarks/compiled_steps.py", *sys.argv[1:]])
        for each in [["calls"], *todo]:
            found += child(["--child", *each], environment, deadline - time.monotonic())
            if arguments.json:
                write_results(arguments.json, {"environment": about, "rows": found})
    show(found)
    return 1 if any("failed" in row for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
