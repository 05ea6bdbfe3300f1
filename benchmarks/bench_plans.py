"""Steps of users' programs within budgets, predicted without a GPU, beside their lower bounds.

    python benchmarks/bench_plans.py [--only TEXT] [--card h100] [--parts 80,67,50,33]

Each program is run dry on the card's profile: those of _wild_programs.py, and the rows of full_card.py. Its
step is predicted at parts of the peak, in percent. `predicted` is what `plan` says for the faster kind of
update, `scheduled` the same on an idle link that costs operators and the host nothing, and `bound`
lower_bound.py's, which is for every policy. Times are in multiples of the step in core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch_uvm._tools import plans
from torch_uvm._tools.cards import Card, link_rates, load_card
from torch_uvm._tools.dry_runs import FEWEST, DryRunError, dry_run
from torch_uvm._tools.lower_bound import bound
from torch_uvm._tools.plans import Loop, faster
from torch_uvm._tools.schedules import TracedLoop

FOLDER = Path(__file__).resolve().parent
WILD = "t5 unet experts".split()
REAL = "a b c d e".split()
CHECKS = 32  #: of the bound: 64 give up to a percent more, and take several times as long


class Row(NamedTuple):
    """Multiples of the step in core."""

    part: int
    predicted: float
    scheduled: float
    bound: float


def loops_of(argv: list[str], card: Card, folder: Path) -> list[Loop]:
    """The program's loop with updates in place; and with deferred ones, where any can wait.

    Raises:
        DryRunError, ValueError: it has no plan.
    """
    found = dry_run(argv, cards=[card], folder=folder, steps=FEWEST)
    (trace,) = found.loops()
    return plans.loops_of(trace, card, on_gpu=False)


def rows(loops: Sequence[Loop], parts: Sequence[int]) -> Iterator[Row]:
    """Those that have a schedule."""
    whole = loops[0]
    for part in parts:
        budget = whole.memory.peak_bytes * part // 100
        predicted = faster([it.point(budget) for it in loops]).step_ms
        room, rates = budget - whole.memory.added_bytes, link_rates(whole.card)
        scheduled = min(TracedLoop(it.trace).predicted(room, 0.0, rates).ms for it in loops)
        if predicted is not None:
            core = whole.in_core_ms
            least = bound(whole.trace, budget, whole.whole.in_core_ms, rates, CHECKS)["bound_ms"]
            yield Row(part, *(max(each, core) / core for each in (predicted, scheduled, least)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--card", default="h100")
    parser.add_argument("--parts", default="80,67,50,33", help="of the peak, in percent")
    arguments = parser.parse_args()
    card, parts = load_card(arguments.card), [int(part) for part in arguments.parts.split(",")]
    names = [("full card " + name, ["_full_card_program.py", name]) for name in REAL]
    names += [(name, ["_wild_programs.py", name]) for name in WILD]
    titles = ("peak GiB", "core ms", "part", "predicted", "scheduled", "bound")
    print(f"{'program':14}" + "".join(f"{title:>11}" for title in titles))
    found: list[Row] = []
    for name, (script, *words) in names:
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                loops = loops_of([str(FOLDER / script), *words], card, Path(folder))
            except (DryRunError, ValueError) as error:
                print(f"{name:14} no plan: {error}", flush=True)
                continue
        for row in rows(loops, parts):
            found.append(row)
            peak, core = loops[0].memory.peak_bytes / 2**30, loops[0].in_core_ms
            times = "".join(f"{each:11.2f}" for each in row[1:])
            print(f"{name:14}{peak:11.2f}{core:11.0f}{row.part:10}%{times}", flush=True)
    for kind in ("predicted", "scheduled"):
        ratios = [getattr(row, kind) / row.bound for row in found]
        if ratios:
            print(f"{kind} / bound: mean {statistics.mean(ratios):.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
