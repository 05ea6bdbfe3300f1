"""What the numbers of a run mean, in words. Each sentence follows from numbers that the page shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch_uvm import _C
from torch_uvm.report.facts import Facts

#: The engine learns the schedule in the first steps.
_FEW_STEPS = 10


class Advice(NamedTuple):
    """``kind``: "act" is worth a change; "good" or "note" is not. Text in backticks is code."""

    kind: str
    key: str
    title: str
    text: str


def advice(facts: Facts) -> list[Advice]:
    """All advice that applies, what is worth a change first."""
    found = [*_of_limits(facts), *_of_transfers(facts), *_of_a_run_that_fits(facts)]
    return sorted(found, key=lambda it: ("act", "good", "note").index(it.kind))


def _of_limits(facts: Facts) -> Iterator[Advice]:
    size = _C.format_bytes
    if count := int(facts.total("num_ooms")):
        yield Advice(
            "act",
            "oom",
            f"Out of memory, {count} times",
            "A request did not fit, even after everything that could be evicted was. Raise the limit that "
            "was reached (budget, limit or host limit, below), use a smaller batch, or checkpoint "
            "activations.",
        )
    if count := int(facts.total("over_budget")):
        yield Advice(
            "act",
            "over-budget",
            f"{count} operators were over the budget",
            "Their operands and results alone did not fit. They were used on the host, across the link, or "
            "the budget was exceeded while they ran. Raise the budget, use a smaller batch, or split the "
            "largest layers. An optimizer that updates all parameters by the same operators (`foreach`, "
            "PyTorch's default) needs less with `fused=True`, which makes no temporaries.",
        )
    if facts.host_limit is not None and facts.most_host >= 0.95 * facts.host_limit:
        yield Advice(
            "act",
            "host-limit",
            "The limit of pinned host memory was reached",
            f"{size(facts.most_host)} of {size(facts.host_limit)}. At the limit nothing can be evicted from "
            "a device. Raise host_limit (`run --host-limit`).",
        )
    if facts.limit is not None and facts.most_reserved >= 0.98 * facts.limit:
        yield Advice(
            "act",
            "limit",
            "The limit of managed memory was reached",
            f"{size(facts.most_reserved)} of {size(facts.limit)}. At the limit, cached memory is released; "
            "after that, allocations raise torch.OutOfMemoryError. Raise the limit (`run --limit`).",
        )


def _of_transfers(facts: Facts) -> Iterator[Advice]:
    if not facts.crossed:
        return
    if facts.waited >= 0.05 * facts.seconds:
        yield Advice(
            "act",
            "waited",
            f"The host waited {100 * facts.waited / facts.seconds:.0f} % of the time",
            "For copies, or for memory on the device. A larger budget moves fewer bytes. A larger batch "
            "computes longer for the same parameters, which hides more of their transfers.",
        )
    hits, misses, steps = facts.total("plan_hits"), facts.total("plan_misses"), facts.samples[-1].steps
    middle = next(it.totals for it in facts.samples if it.steps >= steps / 2)
    later_hits, later_misses = hits - middle.get("plan_hits", 0), misses - middle.get("plan_misses", 0)
    share = later_misses / max(later_hits + later_misses, 1)
    if not misses:
        return
    if not hits:
        yield Advice(
            "note",
            "no-plan",
            "No step repeated",
            "The engine learns its schedule from a step that repeats. Until then tensors are fetched on "
            "demand. In a step without an optimizer (evaluation), torch_uvm.step() marks the end.",
        )
    elif steps >= _FEW_STEPS and share >= 0.05:
        yield Advice(
            "act",
            "misses",
            f"{100 * share:.0f} % of the operators do not come as planned",
            "Counted after the first half of the steps. Operands outside the schedule are fetched on demand, "
            "and the operator waits. The usual reason is shapes that change from step to step: pad them, or "
            "sort batches by length. Another is steps of several kinds: mark each end by torch_uvm.step().",
        )


def _of_a_run_that_fits(facts: Facts) -> Iterator[Advice]:
    if not facts.most_reserved:
        why = "The script made no tensor on the accelerator."
        if not facts.enabled:
            why = "The switch was off when the script ended: torch_uvm.enable(), or `run`, turns it on."
        yield Advice("note", "nothing", "No managed memory was used", why)
    elif not facts.budgets and not facts.one_memory:
        yield Advice(
            "note",
            "no-budget",
            "There was no budget",
            "The driver moved pages on access. That is not visible here, so the figures of the link are 0. "
            'With a budget ("auto" is the default) tensors are fetched before they are needed.',
        )
    elif facts.budgets and not facts.crossed:
        yield Advice(
            "good",
            "fits",
            "Nothing was short",
            "All tensors were on their device all the time: no budget was needed, and nothing crossed the "
            "link. A budget below the peak would move tensors to the host.",
        )
    if facts.backend == "emulated":
        yield Advice(
            "note",
            "modelled",
            "This was the emulated accelerator",
            "Bytes and counts are what happened; milliseconds of transfers are modelled, and times are of a "
            "host that also computes what a device would. They say nothing of the speed of a GPU.",
        )
