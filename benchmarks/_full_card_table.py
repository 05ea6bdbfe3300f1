"""The table of full_card.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

GIB = 1024**3
SAME_BITS = ("uvm", "plain", "incore")  # modes that run the same operators on the same device


def number(value: float | None, form: str, unit: float = 1) -> str:
    return "-" if value is None else format(value / unit, form)


def name_of(run: Mapping[str, Any]) -> str:
    return " ".join(filter(None, [run["row"], run["mode"], run["options"]]))


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    """A line for each run, with its first steps below, and one for each plan."""
    rate = document["rate"]
    if rate is not None:
        yield f"products of bfloat16 matrices: {rate / 1e12:.0f} TFLOP/s"
    yield (
        f"{'run':<28}{'tokens/s':>9}{'TFLOP/s':>9}{'share':>7}{'step, s':>9}{'/ bound':>8}"
        f"{'tenth at':>10}{'device':>8}{'host':>7}{'rss':>7}  loss"
    )
    for run in sorted(document["runs"], key=lambda it: str(it["row"])):
        if not run["steps"]:
            yield f"{name_of(run):<28}  {run['status']}"
            continue
        bound = document["plans"].get(run["row"], {}).get("bound_ms")
        step, flops = run["step_s"], run["flops"]
        last = float.fromhex(run["results"][-1])
        yield (
            f"{name_of(run):<28}{run['tokens_per_s']:>9.0f}{flops / 1e12:>9.1f}"
            f"{number(flops / rate if rate else None, '.2f'):>7}{step:>9.3f}"
            f"{number(step / bound * 1e3 if bound else None, '.2f'):>8}{number(run['tenth_at_s'], '.0f'):>10}"
            f"{number(run['device_bytes'], '.1f', GIB):>8}{number(run['host_bytes'], '.1f', GIB):>7}"
            f"{number(run['rss_bytes'], '.1f', GIB):>7}  {last:.4f}"
        )
        yield "    steps " + " ".join(f"{it:.2f}" for it in run["first_s"])
        if run["status"] != "ok":
            yield f"    {run['status']}"
        if "residency" in run:
            yield f"    {moved(run)}"
    for row, plan in sorted(document["plans"].items()):
        if "failed" in plan:
            yield f"plan of {row}: {' '.join(plan['failed'])}"
            continue
        yield (
            f"plan of {row} on {plan['card']}, {plan['budget'] / GIB:.1f} GiB: "
            f"step {number(plan['step_ms'], '.0f')} ms, bound {number(plan['bound_ms'], '.0f')}, "
            f"in core {number(plan.get('in_core_ms'), '.0f')}, "
            f"peak {number(plan.get('peak_bytes'), '.1f', GIB)} GiB"
        )


def moved(run: Mapping[str, Any]) -> str:
    """What the engine did, over the whole run."""
    stats = run["residency"]
    sizes = ", ".join(
        f"{key.replace('_', ' ')} {stats[key]['bytes'] / GIB:.1f}"
        for key in ("fetched", "written_back", "used_in_place")
    )
    return (
        f"GiB {sizes}; planned {stats['plan_hits']}, not {stats['plan_misses']}, "
        f"over the budget {stats['over_budget']}; managed {run['peak_managed_bytes'] / GIB:.1f} GiB "
        f"of {run['limit'] / GIB:.1f}"
    )


def losses_compared(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For two deterministic runs of a row: whether their losses are the same to the last bit."""
    wanted = [it for it in runs if it["deterministic"] and it["steps"] and it["mode"] in SAME_BITS]
    for one, other in combinations(wanted, 2):
        if one["row"] != other["row"]:
            continue
        pairs = list(zip(one["results"], other["results"], strict=False))
        equal = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same = f"equal bits in {len(pairs)} steps" if equal == len(pairs) else f"step {equal} differs"
        yield f"{name_of(one)} and {name_of(other)}: {same}"
