"""Profiles a step of bench_residency.py: kernels and copies by stream, and the gaps of the compute stream.

    python benchmarks/profile_residency.py "engine, deferred" "16k tokens, checkpointing" 4162846720 out

For a GPU. Trains until steps repeat, then profiles two steps. Prints each stream's busy time, each copy
kind's rate, and the gaps of the compute stream. For each gap it names the copies that end with it, which the
stream waited for, and whether the next kernel was launched by then; if not, the stream waited for the host.
Writes the trace to OUT.json.gz (chrome://tracing). Has the same guard as bench_residency.py: a limit of 8 GiB
and 6 GiB more than that free.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from _residency_limits import LIMIT, MARGIN

LEAST_GAP_US = 200.0
NEAR_US = 60.0
ON_THE_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]


def end_of(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def profile(column_name: str, workload_name: str, budget: int, trace: Path) -> None:
    os.environ["TORCH_UVM_CONF"] = f"limit:{LIMIT}"  # set before torch_uvm is imported
    import _residency_child as child
    import torch
    from _residency_columns import COLUMNS
    from _workloads import make
    from torch.profiler import ProfilerActivity

    device = torch.device("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    child.warm_context(device)
    free = torch.cuda.mem_get_info()[0]
    if free < LIMIT + MARGIN:
        raise SystemExit(f"refused: {free} bytes are free on the card, and {LIMIT + MARGIN} have to be")
    column = COLUMNS[column_name](device, budget, None)
    column.start()
    training = child.Training(column, make(workload_name, device, False), device)
    for _ in range(8 + column.settles):
        print(f"warm-up {training.alone():.1f} ms", flush=True)
    print("until schedules are settled:", [round(ms, 1) for ms in training.settle()], "ms", flush=True)
    # Host operators are not recorded: recording them takes longer than running them.
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiled:
        training.step()
        training.step()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))


def print_streams(by_stream: dict[int, list[Event]], compute: int) -> None:
    for stream, events in by_stream.items():
        busy = sum(event["dur"] for event in events) / 1e3
        names = Counter(event["name"][:32] for event in events).most_common(3)
        role = " (compute)" if stream == compute else ""
        print(f"stream {stream}{role}: {len(events)}, busy {busy:.1f} ms, {names}")
    kinds: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for stream, events in by_stream.items():
        for event in events:
            if event["cat"] == "gpu_memcpy":
                kinds[stream, event["name"]].append(event)
    for (stream, name), events in kinds.items():
        ms = sum(event["dur"] for event in events) / 1e3
        count = sum(event["args"].get("bytes", 0) for event in events)
        rate = count / ms / 1e6
        print(f"  {name} on {stream}: {len(events)}, {ms:.1f} ms, {count / 1e9:.2f} GB, {rate:.1f} GB/s")


def print_gaps(by_stream: dict[int, list[Event]], compute: int, launches: dict[int, Event]) -> None:
    others = [event for stream, events in by_stream.items() if stream != compute for event in events]
    begin = by_stream[compute][0]["ts"]
    end, gaps = begin, 0.0
    for event in by_stream[compute]:
        gap = event["ts"] - end
        if gap > LEAST_GAP_US:
            gaps += gap
            ending = [
                f"{other['name'][:12]} on {other['args']['stream']} of {other['dur'] / 1e3:.2f} ms"
                for other in others
                if abs(end_of(other) - event["ts"]) < NEAR_US
            ]
            launch = launches.get(event["args"].get("correlation", -1))
            early = (
                "" if launch is None else f", launched {(event['ts'] - end_of(launch)) / 1e3:.2f} ms ahead"
            )
            at = (end - begin) / 1e3
            print(f"  {gap / 1e3:6.2f} ms at {at:8.2f}, before {event['name'][:48]}{early}: {ending}")
        end = max(end, end_of(event))
    print(f"gaps of the compute stream: {gaps / 1e3:.1f} ms of {(end - begin) / 1e3:.1f}")


def analyse(trace: Path) -> None:
    events = json.loads(trace.read_text())["traceEvents"]
    by_stream: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(
        (event for event in events if event.get("cat") in ON_THE_DEVICE), key=lambda e: e["ts"]
    ):
        by_stream[event["args"]["stream"]].append(event)
    compute = max(by_stream, key=lambda stream: sum(event["cat"] == "kernel" for event in by_stream[stream]))
    calls = [event for event in events if event.get("cat") in CALLS]
    launches = {call["args"]["correlation"]: call for call in calls if "correlation" in call.get("args", {})}
    print_streams(by_stream, compute)
    print_gaps(by_stream, compute, launches)
    kernels: Counter[str] = Counter()
    for event in by_stream[compute]:
        kernels[event["name"][:60]] += event["dur"]
    host: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        host[call["name"]].append(call["dur"])
    print("kernels, ms:", [(name, round(us / 1e3, 1)) for name, us in kernels.most_common(12)])
    for name, each in sorted(host.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"  {name}: {len(each)} calls, {sum(each) / 1e3:.1f} ms, the longest {max(each) / 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("column")
    parser.add_argument("workload")
    parser.add_argument("budget", type=int, help="bytes")
    parser.add_argument("out", type=Path, help="the trace, without .json.gz")
    arguments = parser.parse_args()
    trace = arguments.out.with_suffix(".json")
    profile(arguments.column, arguments.workload, arguments.budget, trace)
    analyse(trace)
    trace.with_suffix(".json.gz").write_bytes(gzip.compress(trace.read_bytes()))
    trace.unlink()


if __name__ == "__main__":
    main()
