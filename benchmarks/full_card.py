"""Models that need more memory than a card has, on the whole card: this library beside others.

    python benchmarks/full_card.py --rows a,d --modes uvm,plain,fsdp,torchao --seconds-per-run 120 --json OUT
    python benchmarks/full_card.py --plan --card h100 --json OUT       # predictions and bounds; needs no GPU
    python benchmarks/full_card.py --tiny                              # a rehearsal; needs no GPU

Each row runs in each mode, in a process of its own: _full_card_program.py, which is ordinary PyTorch. Its
lines of JSON are kept as they come, so a run that is cut off still tells its steps. --json is written after
each run; --earlier reads such files, adds their runs to the table, and replaces those that are run again.

| row | program | device memory |
| --- | --- | --- |
| a | Llama of 7 B, float32 under bfloat16 autocast, 8 192 tokens a step | the card |
| b | the same, 65 536 tokens a step by 8 accumulated gradients | the card |
| c | 14 B, all in bfloat16, 65 536 tokens a step by 8 accumulated gradients | the card |
| d | 7 B, all in bfloat16, 8 192 tokens a step | 20 GiB |
| e | LoRA on a frozen 14 B in bfloat16, 8 192 tokens a step | 16 GiB |
| f | 14 B in bfloat16 that generates 32 tokens after prompts of 256, batch 8, greedily | 16 GiB |

Training checkpoints its blocks and has a fused AdamW.

| mode | what it is |
| --- | --- |
| uvm | `python -m torch_uvm run --limit BYTES`; in rows d, e and f also `--budget` |
| plain | PyTorch; in rows d, e and f it may take the budget and no more |
| incore | PyTorch with all of the card; not run where the row does not fit |
| fsdp | FSDP2 with `CPUOffloadPolicy`, one rank; capped as plain |
| torchao | `torchao.optim.CPUOffloadOptimizer`; rows a to d, capped as plain |

The limit of managed memory is what the card has free less 6 GiB (tests/_gpu_guard.py); in rows d, e and f a
sixteenth above the budget. FLOPs are the model's: products and causal attention, without what checkpoints
compute again. Their share is of the rate of products of random 8192 x 8192 matrices in bfloat16. A step is
the median of the second half of the steps. Memory of the device is by NVML, over what was taken before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _full_card_program import ROWS, tiny
from _full_card_table import lines_of, losses_compared
from _results import ROOT, describe, device_description, write_results
from _runs import Result, Watch, environment, python, run_child

from torch_uvm._tools.cards import load_card

sys.path.insert(0, str(ROOT / "tests"))
from _gpu_guard import GIB, MARGIN, MIB, Refused, check_afterwards, check_room, free_by_nvml, room

MODES = ("uvm", "plain", "incore", "fsdp", "torchao")
PROGRAM = ROOT / "benchmarks" / "_full_card_program.py"
BUDGETS = {"d": 20 * GIB, "e": 16 * GIB, "f": 16 * GIB}
NEEDED = {"a": 103 * GIB, "b": 120 * GIB, "c": 129 * GIB, "d": 53 * GIB, "e": 46 * GIB, "f": 34 * GIB}
TINY_LIMIT, TINY_BUDGET = 24 * MIB, 8 * MIB
TINY_OPTIONS = "relocation_min:4KiB,emulated_memory:64MiB"
NVML = {"NVML": free_by_nvml}  # the only reader: a CUDA context of this process would take memory


def not_run(row: str, mode: str, tiny: bool) -> str | None:
    """The reason why a row is not run in a mode; None: it is."""
    if mode == "torchao" and row not in "abcd":
        return "it trains no optimizer state of that size"
    if mode == "torchao" and importlib.util.find_spec("torchao") is None:
        return "torchao cannot be imported"
    if row == "e" and importlib.util.find_spec("peft") is None:
        return "peft cannot be imported"
    if mode == "incore" and not tiny:
        free = min(free_by_nvml() or [0])
        if free < NEEDED[row]:
            return f"it needs {NEEDED[row] / GIB:.0f} GiB; {free / GIB:.1f} GiB are free"
    return None


def limits(row: str, tiny: bool) -> tuple[int, int | None]:
    """The limit of managed memory, checked against what is free, and the budget, if the row has one.

    Raises:
        Refused: too little is free.
    """
    if tiny:
        return TINY_LIMIT, TINY_BUDGET if row in BUDGETS else None
    budget = BUDGETS.get(row)
    limit = room(NVML) if budget is None else budget + budget // 16
    check_room(limit, NVML)
    return limit, budget


def command(row: str, mode: str, args: argparse.Namespace, stats: Path) -> tuple[list[str], dict[str, Any]]:
    """The command of a run, and the figures that it has to keep to."""
    words = [str(PROGRAM), row, "--seconds", str(args.seconds_per_run)]
    words += ["--steps", str(args.steps)] if args.steps else []
    words += ["--tiny"] if args.tiny else []
    words += ["--deterministic"] if args.deterministic else []
    if mode == "uvm":
        limit, budget = limits(row, args.tiny)
        options = ["--limit", str(limit), "--stats", str(stats), *shlex.split(args.options)]
        options += ["--budget", str(budget)] if budget else []
        return python("-m", "torch_uvm", "run", *options, *words), {"limit": limit, "budget": budget}
    words += ["--peer", mode] if mode in ("fsdp", "torchao") else []
    cap = BUDGETS.get(row) if mode != "incore" else None
    words += ["--cap", str(cap)] if cap else []
    return python(*words), {"cap": cap}


def variables(tiny: bool) -> dict[str, str]:
    kept = environment() | {"HF_HUB_OFFLINE": "1"}
    if tiny:
        kept |= {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": TINY_OPTIONS, "OMP_NUM_THREADS": "1"}
    return kept


def summary(found: Result) -> dict[str, Any]:
    """The figures of a run, from the lines that its program printed."""
    made: dict[str, Any] = next((it for it in found.lines if it["what"] == "made"), {})
    steps = [it for it in found.lines if it["what"] == "step"]
    seconds = [it["seconds"] for it in steps]
    figures: dict[str, Any] = {
        "status": found.status,
        "parameters": made.get("parameters"),
        "made_at_s": made.get("at_s"),
        "steps": len(steps),
        "first_s": [round(it, 3) for it in seconds[:10]],
        "tenth_at_s": steps[9]["at_s"] if len(steps) > 9 else None,
        "device_bytes": found.device_bytes,
        "lowest_free_bytes": found.lowest_free,
        "rss_bytes": max((it["rss"] for it in found.lines), default=None),
        "host_bytes": found.host_bytes,
        "results": [it["result"] for it in steps],
    }
    if steps:
        figures["step_s"] = statistics.median(seconds[len(seconds) // 2 :])
        figures["tokens_per_s"] = made["tokens"] / figures["step_s"]
        figures["flops"] = made["flops"] / figures["step_s"]
    return figures


def run(row: str, mode: str, args: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Runs a row in a mode. Raises Refused if that was, or would be, unsafe."""
    about = {"row": row, "mode": mode, "options": args.options if mode == "uvm" else ""}
    about |= {"deterministic": args.deterministic}
    reason = not_run(row, mode, args.tiny)
    if reason is not None:
        return about | {"status": f"not run: {reason}", "steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        words, given = command(row, mode, args, stats)
        found = run_child(words, variables(args.tiny), args.seconds_per_run, watch, echo=True)
        figures: dict[str, Any] = about | given | summary(found)
        if stats.exists():
            said = json.loads(stats.read_text())
            figures |= {"peak_managed_bytes": said["peak_managed_bytes"], "residency": said["residency"]}
            check_afterwards(
                given["limit"], said["limit"], said["peak_managed_bytes"], figures["lowest_free_bytes"]
            )
    if figures["status"] != "ok":
        figures["output"] = found.output[-12:]
    return figures


def measure_rate(args: argparse.Namespace, watch: Watch) -> float | None:
    words = python(PROGRAM, "rate", *(["--tiny"] if args.tiny else []))
    found = run_child(words, variables(args.tiny), 60, watch, echo=True)
    return next((it["flops"] for it in found.lines if it["what"] == "rate"), None)


# --- predictions


def budget_of_card(row: str, runs: Sequence[Mapping[str, Any]], memory: int) -> int:
    """What the engine took of the card in a run; without one, 7/8 of its memory less the margin."""
    for it in runs:
        if it["row"] == row and it["mode"] == "uvm" and it.get("residency"):
            return int(max(it["residency"]["peak_device_bytes"].values()))
    return (memory - MARGIN) * 7 // 8


def plan(row: str, args: argparse.Namespace, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The step that `python -m torch_uvm plan` predicts, and the bound for any policy, in ms.

    Generating has no optimizer, which a plan needs. The bound is the time for weights beyond the budget to
    cross the link, once for each token.
    """
    card = load_card(args.card)
    budget = BUDGETS.get(row) or budget_of_card(row, runs, card.memory_bytes)
    budget = TINY_BUDGET if args.tiny else budget
    program = tiny(ROWS[row]) if args.tiny else ROWS[row]
    if program.new_tokens:
        rest = max(0, 2 * program.products_parameters() - budget)
        return {"budget": budget, "bound_ms": program.new_tokens * rest / card.into * 1e3, "step_ms": None}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        words = python("-m", "torch_uvm", "plan", "--card", args.card, "--budgets", budget, "--json", file)
        words += [str(PROGRAM), row, *(["--tiny"] if args.tiny else [])]
        done = subprocess.run(words, env=variables(False), capture_output=True, text=True, check=False)
        if done.returncode:
            return {"budget": budget, "failed": done.stderr.strip().splitlines()[-3:]}
        found = json.loads(file.read_text())["plans"][0]
    kept = {key: found["points"][0][key] for key in ("step_ms", "bound_ms", "optimizer")}
    return {"budget": budget} | kept | {key: found[key] for key in ("in_core_ms", "peak_bytes")}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="such as a,d; all, unless told")
    parser.add_argument("--modes", default=",".join(MODES), help="such as uvm,fsdp; all, unless told")
    parser.add_argument("--seconds-per-run", type=float, default=120, metavar="S")
    parser.add_argument("--steps", type=int, help="at most so many")
    parser.add_argument("--options", default="", help='more for `run`, as one word: "--optimizer deferred"')
    parser.add_argument("--deterministic", action="store_true", help="so that losses can be compared")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--earlier", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--plan", action="store_true", help="predict instead of measuring")
    parser.add_argument("--card", default="h100", help="that of the plan (h100)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in a few MiB, without a GPU")
    args = parser.parse_args(arguments)
    for name, accepted in (("rows", tuple(ROWS)), ("modes", MODES)):
        words = getattr(args, name).split(",")
        if unknown := [word for word in words if word not in accepted]:
            parser.error(f"--{name} has {unknown[0]!r}; accepted: {', '.join(accepted)}")
        setattr(args, name, words)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    on_gpu = not (args.tiny or args.plan)
    if on_gpu and not free_by_nvml():
        sys.exit("full_card.py needs a GPU and NVML to see its memory; --plan and --tiny need none")
    document: dict[str, Any] = {"environment": {}, "rate": None, "plans": {}, "runs": []}
    for path in args.earlier:
        earlier = json.loads(path.read_text())
        runs = document["runs"] + earlier["runs"]
        document |= earlier | {"plans": document["plans"] | earlier["plans"], "runs": runs}
    if not args.plan or not document["environment"]:
        own = ["python", "benchmarks/full_card.py", *(sys.argv[1:] if arguments is None else arguments)]
        document["environment"] = describe(own) | {"rehearsal": args.tiny}
        document["environment"] |= device_description() if on_gpu else {}

    def write() -> None:
        if args.json is not None:
            write_results(args.json, document)

    status = 0
    if args.plan:
        for row in args.rows:
            document["plans"][row] = {"card": args.card} | plan(row, args, document["runs"])
            write()
    else:
        try:
            with Watch(free_by_nvml if on_gpu else None) as watch:
                document["rate"] = measure_rate(args, watch)
                for row in args.rows:
                    for mode in args.modes:
                        print(f"{row} {mode}", flush=True)
                        new = run(row, mode, args, watch)
                        same = ("row", "mode", "options", "deterministic")
                        document["runs"] = [
                            it for it in document["runs"] if any(it[key] != new[key] for key in same)
                        ] + [new]
                        print(f"  {new['status']}", flush=True)
                        write()
        except Refused as error:
            print(f"not safe: {error}", file=sys.stderr)
            status = 1
    print("\n".join([*lines_of(document), *losses_compared(document["runs"])]))
    return status


if __name__ == "__main__":
    sys.exit(main())
