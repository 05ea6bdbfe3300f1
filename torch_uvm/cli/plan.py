"""`python -m torch_uvm plan`: would a script fit a card, and how long would a step take within budgets."""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch_uvm import _C
from torch_uvm._tools.access_traces import Trace, read_trace
from torch_uvm._tools.cards import Card, card_names, link_rates, load_card
from torch_uvm._tools.dry_runs import FEWEST, STEPS, DryRun, DryRunError, dry_run
from torch_uvm._tools.plans import Loop, loops_of, make_plan, room_of
from torch_uvm._util.escaping import excerpt, printable
from torch_uvm._util.files import of_rank, output_argument, rank_here
from torch_uvm.cli.plan_text import FORMAT, VERSION, lines_of, lines_of_cards, record_of, smallest
from torch_uvm.cli.progress import Progress
from torch_uvm.cli.script_words import split

SUMMARY = "predict whether a script fits a card, and its step within budgets"

_INTERVALS = 32  #: of the lower bound: 64 give up to a percent more, and take several times as long
_NO_SCIPY = "it needs scipy, which is not installed: pip install scipy"


class _Failed(Exception):
    """The script cannot be planned; the message says what to do."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_uvm plan",
        usage="python -m torch_uvm plan [OPTION ...] (SCRIPT | -m MODULE | --from TRACE) [ARG ...]",
        description="Predicts whether a training script fits a card, and how long a step takes within "
        "budgets. Runs the script dry, without a device and without computing, or reads a trace that was "
        "recorded on a GPU. docs/plan.md says how far to trust it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--card",
        metavar="CARD",
        default="h200",
        help=f"{', '.join(card_names())}, or a file.json; h200 unless told",
    )
    parser.add_argument(
        "--cards", metavar="CARD,...", help="a table of several, and the smallest on which a script is fast"
    )
    parser.add_argument(
        "--budgets",
        metavar="BYTES,...",
        default="auto",
        help="such as 8GiB,12GiB; auto, unless told, chooses some",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help=f"steps to run dry after the first one, {FEWEST} or more; unless told {STEPS[0]}, and up to "
        f"{STEPS[-1]} where those differ",
    )
    parser.add_argument("--json", metavar="FILE", type=output_argument, help="write the plan, for tools")
    parser.add_argument(
        "--from",
        dest="trace",
        metavar="TRACE",
        type=Path,
        help="a trace of torch_uvm.tools.record_accesses, recorded where everything fits",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="plan a module")
    return parser


def _budgets(text: str) -> list[int] | None:
    if text == "auto":
        return None
    try:
        found = [_C.parse_bytes(_whole_bytes(word)) for word in text.split(",")]
        if not all(found):
            raise ValueError("a budget of 0 bytes")
    except ValueError as error:
        accepted = "auto, or sizes such as 8GiB,12GiB"
        raise ValueError(f"--budgets {excerpt(text)}: {error}; accepted: {accepted}") from None
    return found


def _whole_bytes(word: str) -> str:
    """Rounds such as 3.9GiB down to bytes. Other words stay as they are."""
    found = re.fullmatch(r"\s*(\d{1,9}\.\d{1,9})\s*([KMGT]i?B)\s*", word, re.IGNORECASE)
    return word if found is None else str(int(Fraction(found[1]) * _C.parse_bytes(f"1{found[2]}")))


def _read(path: Path) -> Trace:
    try:
        with Progress(f"reading {printable(path.name)}") as reading:
            trace = read_trace(path, reading)
    except OSError as error:
        raise ValueError(
            f"--from {excerpt(str(path))}: {error.strerror}; expected a file that "
            f"torch_uvm.tools.record_accesses has written (docs/annex.md)"
        ) from None
    if not trace.groups:
        raise ValueError(
            f"{printable(path)}: the trace has no durations of operators. Record it on a GPU under a budget "
            f"in which everything fits (docs/annex.md)"
        )
    return trace


def _bound(loop: Loop) -> Callable[[Trace, int], float] | None:
    """The lower bound of a step; None: scipy is not installed."""
    try:
        from torch_uvm._tools.lower_bound import bound
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("numpy", "scipy"):
            raise
        return None
    rates = link_rates(loop.card)

    def of(trace: Trace, budget: int) -> float:
        found = bound(trace, budget, None, rates, _INTERVALS, loop.whole)
        return max(found["bound_ms"], loop.in_core_ms)

    return of


def _planned(
    loops: Sequence[Loop], budgets: Sequence[int] | None, of: str, found: DryRun | None = None
) -> dict[str, Any]:
    """The record of a plan; of a dry run, if there was one."""
    loop = loops[0]
    for budget in budgets or ():
        if budget < loop.least_bytes and loop.point(budget).step_ms is None:
            size, name = _C.format_bytes, loop.memory.largest_operator[1]
            raise ValueError(
                f"--budgets: {size(budget)} is too little for {printable(name)}, whose operands and results "
                f"need {size(loop.least_bytes)}. Give that or more, or make them smaller: a smaller batch"
            )
    bound = _bound(loop)
    with Progress("planning") as planning:
        peak_bytes = None if found is None else found.peak_bytes
        plan = make_plan(loops, budgets, bound, peak_bytes, planning)
    note = "" if bound is not None else _NO_SCIPY
    return record_of(plan, of, len(loops) > 1, found, note)


def _from_script(
    arguments: argparse.Namespace, words: list[str], cards: Sequence[Card], budgets: list[int] | None
) -> list[dict[str, Any]]:
    """The plan for each card. With several, each gets the budget that it would have."""
    argv = words if arguments.module is None else ["-m", arguments.module, *words]
    if arguments.module is None and not Path(words[0]).exists():
        raise ValueError(
            f"there is no script {excerpt(words[0])} in {excerpt(str(Path.cwd()))}; give its path, or "
            f"-m MODULE"
        )
    of = " ".join(argv) + ("" if rank_here() is None else f" of rank {rank_here()}")
    with tempfile.TemporaryDirectory(prefix="torch_uvm-plan-") as folder:
        for steps in STEPS if arguments.steps is None else (arguments.steps,):
            found = _dry_run(argv, cards, Path(folder), steps)
            try:
                traces = found.loops()
                if not traces[0].operators:
                    raise ValueError(f"{of}: no operator uses a storage on the device of 256 KiB or more")
                loops = [
                    loops_of(trace, card, on_gpu=False) for trace, card in zip(traces, cards, strict=True)
                ]
                break
            except ValueError as error:
                differs = f"{of}: {error}"
            if found.ended and found.steps < FEWEST:
                raise _Failed(
                    f"the script ended after {1 + found.steps} steps of its optimizer; a plan needs "
                    f"{1 + STEPS[0]} of which the last two are alike, or {1 + FEWEST}. Let it run longer, "
                    f"for example with more data or epochs"
                )
        else:
            raise _Failed(
                f"{differs}. {steps} steps were run. If shapes take turns, more steps help: "
                f"--steps {4 * steps}. If each step has shapes of its own, give all the same: pad, or drop "
                f"the last batch"
            )
        if len(cards) == 1:
            return [_planned(loops[0], budgets, of, found)]
        plans = [
            make_plan(it, [room_of(card)], peak_bytes=found.peak_bytes)
            for it, card in zip(loops, cards, strict=True)
        ]
        return [record_of(it, of, len(loops[0]) > 1, found) for it in plans]


def _dry_run(argv: list[str], cards: Sequence[Card], folder: Path, steps: int) -> DryRun:
    try:
        with Progress("dry run") as running:
            return dry_run(argv, cards=cards, folder=folder, steps=steps, progress=running)
    except DryRunError as error:
        lines = error.output.read_text(encoding="utf-8", errors="replace").splitlines()
        sys.stderr.writelines(f"{printable(line)}\n" for line in lines[-20:])
        raise _Failed(f"{error}. The last lines that it printed are above") from None


def _records(arguments: argparse.Namespace, words: list[str]) -> list[dict[str, Any]]:
    """The plan, or one for each card."""
    if arguments.steps is not None and arguments.steps < FEWEST:
        raise ValueError(
            f"--steps {arguments.steps}; expected {FEWEST} or more, all alike: fewer show no loop"
        )
    if arguments.cards is not None and arguments.trace is not None:
        raise ValueError("--cards needs a script: a trace has the times of one card")
    is_script = bool(words) or arguments.module is not None
    if is_script == (arguments.trace is not None):
        raise ValueError("give a SCRIPT (or -m MODULE), or a trace with --from, and not both")
    budgets = _budgets(arguments.budgets)
    if arguments.cards is not None:
        return _from_script(arguments, words, [load_card(it) for it in arguments.cards.split(",")], None)
    card = load_card(arguments.card)
    if arguments.trace is None:
        return _from_script(arguments, words, [card], budgets)
    trace = _read(arguments.trace)
    try:
        loops = loops_of(trace, card)
    except ValueError as error:
        raise ValueError(f"{arguments.trace}: {error}") from None
    return [_planned(loops, budgets, str(arguments.trace))]


def _write(arguments: argparse.Namespace, records: Sequence[dict[str, Any]]) -> None:
    lines = lines_of_cards(records) if arguments.cards is not None else lines_of(records[0])
    print("\n".join(lines), flush=True)  # at once: ranks of torchrun print beside each other
    if arguments.json is not None:
        head = {"format": FORMAT, "version": VERSION, "units": {"time": "ms", "size": "bytes"}}
        found = smallest(records) if arguments.cards is not None else None
        plans = {"plans": records, "smallest": found and found["card"]}
        of_rank(arguments.json).write_text(json.dumps(head | plans, indent=1) + "\n")


def main(argv: Sequence[str]) -> int:
    """Plans a script or a trace, prints the plan, and writes it to files."""
    parser = _parser()
    head, rest = split(parser, argv)
    arguments = parser.parse_args(head)
    gc.disable()  # it would visit the millions of objects of a trace, which has no cycles, again and again
    try:
        _write(arguments, _records(arguments, rest))
    except _Failed as error:
        print(f"{parser.prog}: {printable(error)}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(printable(error))
    finally:
        gc.enable()
    return 0
