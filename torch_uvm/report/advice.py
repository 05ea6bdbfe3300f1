"""What the numbers of a run mean, in words. Each sentence follows from numbers that the page shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_uvm import _C
from torch_uvm.report.facts import Facts

#: Optimizers with deferrable steps, as docs/how-it-works.md lists them.
DEFERRABLE = {"Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam"}


#: The engine learns the schedule in the first steps.
_FEW_STEPS = 10


@dataclass(frozen=True)
class Advice:
    """``kind``: "good", "note" or "act"; "act" is for what is worth a change."""

    kind: str
    key: str
    title: str
    text: str


def _bytes(count: float) -> str:
    return _C.format_bytes(int(count))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.2f} %"


def _nothing_managed(facts: Facts) -> Advice | None:
    if facts.most_reserved:
        return None
    why = (
        "The script made no tensor on the accelerator."
        if facts.enabled
        else "The switch was off when the script ended: torch_uvm.enable(), or `run`, turns it on."
    )
    return Advice("note", "nothing", "No managed memory was used", why)


def _nothing_short(facts: Facts) -> Advice | None:
    if not facts.most_reserved or not facts.budgets or facts.crossed:
        return None
    peaks = ", ".join(
        f"{_bytes(peak)} of {_bytes(facts.budgets[device])}"
        for device, peak in sorted(facts.peaks.items())
        if device in facts.budgets
    )
    return Advice(
        "good",
        "fits",
        "Nothing was short",
        f"All tensors were on their device all the time: at most {peaks}. No budget was needed, and nothing "
        "crossed the link. A budget below that peak would move tensors to the host.",
    )


def _no_budget(facts: Facts) -> Advice | None:
    if facts.budgets or not facts.most_reserved:
        return None
    if facts.one_memory:
        return Advice(
            "good",
            "one-memory",
            "Device and host have one memory",
            "Nothing had to move, so there is no engine, and a budget has no effect. `run --limit` bounds "
            "the memory.",
        )
    return Advice(
        "note",
        "no-budget",
        "There was no budget",
        "The driver moved pages on access. That is not visible here, so the figures of the link are 0. With "
        'a budget ("auto" is the default) tensors are fetched before they are needed.',
    )


def _out_of_memory(facts: Facts) -> Advice | None:
    count = int(facts.total("num_ooms"))
    if not count:
        return None
    return Advice(
        "act",
        "oom",
        f"Out of memory, {count} times",
        "A request did not fit, even after everything that could be evicted was. Raise the limit that was "
        "reached (budget, limit or host limit, below), use a smaller batch, or checkpoint activations.",
    )


def _over_budget(facts: Facts) -> Advice | None:
    count = int(facts.total("over_budget"))
    if not count:
        return None
    if facts.foreach and 2 * facts.over_in_steps >= count:
        names = " and ".join(facts.foreach)
        return Advice(
            "act",
            "over-budget",
            f"{facts.over_in_steps} of {count} operators over the budget are an optimizer's",
            f"{names} updates all parameters by the same operators (`foreach`), whose operands and "
            "temporaries are as large as all parameters together. "
            f"`{facts.foreach[0]}(..., fused=True)` makes no temporaries; `foreach=False` updates one "
            "parameter at a time.",
        )
    return Advice(
        "act",
        "over-budget",
        f"{count} operators were over the budget",
        "Their operands and results alone did not fit. They were used on the host, across the link, or the "
        "budget was exceeded while they ran. Raise the budget, use a smaller batch, or split the largest "
        "layers.",
    )


def _host_limit(facts: Facts) -> Advice | None:
    if facts.host_limit is None or facts.most_host < 0.95 * facts.host_limit:
        return None
    return Advice(
        "act",
        "host-limit",
        "The limit of pinned host memory was reached",
        f"{_bytes(facts.most_host)} of {_bytes(facts.host_limit)}. At the limit nothing can be evicted "
        "from a device. Raise host_limit (`run --host-limit`).",
    )


def _limit(facts: Facts) -> Advice | None:
    if facts.limit is None or facts.most_reserved < 0.98 * facts.limit:
        return None
    return Advice(
        "act",
        "limit",
        "The limit of managed memory was reached",
        f"{_bytes(facts.most_reserved)} of {_bytes(facts.limit)}. At the limit, cached memory is released; "
        "after that, allocations raise torch.OutOfMemoryError. Raise the limit (`run --limit`).",
    )


def _waited(facts: Facts) -> Advice | None:
    waited = (facts.total("waited.ms") + facts.total("made_room.ms")) / 1e3
    if not facts.crossed or waited < 0.05 * facts.seconds:
        return None
    return Advice(
        "act",
        "waited",
        f"The host waited {_percent(waited / facts.seconds)} of the time",
        "For copies, or for memory on the device. A larger budget moves fewer bytes. A larger batch computes "
        "longer for the same parameters, which hides more of their transfers.",
    )


def _later(facts: Facts) -> tuple[float, float]:
    """Hits and misses after the first half of the steps, or, if no step was marked, of the time."""
    steps, seconds = facts.samples[-1].steps, facts.seconds
    middle = next(
        it for it in facts.samples if (it.steps >= steps / 2 if steps else it.seconds >= seconds / 2)
    )
    hits, misses = (facts.total(it) - middle.totals.get(it, 0) for it in ("plan_hits", "plan_misses"))
    return hits, misses


def _plan(facts: Facts) -> Advice | None:
    hits, misses = facts.total("plan_hits"), facts.total("plan_misses")
    if not facts.crossed or not misses:
        return None
    if hits == 0:
        return Advice(
            "note",
            "no-plan",
            "No step repeated",
            "The engine learns its schedule from a step that repeats. Until then tensors are fetched on "
            "demand. In a step without an optimizer (evaluation), torch_uvm.step() marks the end.",
        )
    later_hits, later_misses = _later(facts)
    share = later_misses / max(later_hits + later_misses, 1)
    if later_hits and share < 0.05:
        return Advice(
            "good",
            "planned",
            "Steps come as planned",
            f"{int(misses - later_misses)} of {int(misses)} misses were in the first half of the steps. The "
            "engine learns its schedule in the first steps.",
        )
    if facts.samples[-1].steps < _FEW_STEPS:
        return Advice(
            "note",
            "few-steps",
            "Too few steps to judge the plan by",
            f"{int(misses)} of {int(hits + misses)} operators did not come as planned. In the first steps of "
            "any script there is no schedule, and tensors are fetched on demand.",
        )
    return Advice(
        "act",
        "misses",
        f"{_percent(share)} of the operators do not come as planned",
        "Counted after the first half of the steps. Operands outside the schedule are fetched on demand, and "
        "the operator waits. The usual reason is shapes that change from step to step: pad them, or sort "
        "batches by length. Another one is steps of several kinds: mark each end by torch_uvm.step().",
    )


def _deferred(facts: Facts) -> Advice | None:
    able = sorted(DEFERRABLE & set(facts.optimizers))
    if facts.optimizer != "in_place" or not able or not facts.total("fetched.bytes"):
        return None
    return Advice(
        "act",
        "deferred",
        'optimizer="auto" may help',
        f"{', '.join(able)} updated parameters while tensors crossed the link. A deferred update runs right "
        "before the parameter's next use, where its transfers overlap the forward; its bits are the same. "
        "`run --optimizer auto` defers updates once bytes move, and returns where that is slower.",
    )


def _one_line(facts: Facts) -> Advice | None:
    lines: dict[tuple[str, int], int] = {}
    for it in facts.storages:
        if it.file is not None:
            lines[it.file, it.line] = lines.get((it.file, it.line), 0) + it.traffic
    if len(lines) < 2:
        return None
    (file, line), most = max(lines.items(), key=lambda it: it[1])
    total = sum(it.traffic for it in facts.storages)
    if total == 0 or most < 0.5 * total:
        return None
    return Advice(
        "note",
        "one-line",
        f"{_percent(most / total)} of the traffic is of tensors that one line made",
        f"{file}:{line}. If its tensors are used often and are small compared with the budget, "
        "torch_uvm.keep_resident(x) pins them on the device.",
    )


def _failures(facts: Facts) -> Advice | None:
    count = int(facts.total("failures"))
    if not count:
        return None
    return Advice(
        "act",
        "failures",
        f"{count} calls of the runtime failed in the engine",
        "Results are correct all the same, but memory for copies or bookkeeping was short. Lower host_limit "
        "or the limit, or free memory on this machine.",
    )


def _modelled(facts: Facts) -> Advice | None:
    if facts.backend != "emulated":
        return None
    return Advice(
        "note",
        "modelled",
        "This was the emulated accelerator",
        "Bytes and counts are what happened; milliseconds of transfers are modelled, and rates over time are "
        "of a host that also computes what a device would. They say nothing of the speed of a GPU.",
    )


_RULES: tuple[Callable[[Facts], Advice | None], ...] = (
    _out_of_memory,
    _over_budget,
    _host_limit,
    _limit,
    _waited,
    _plan,
    _deferred,
    _failures,
    _nothing_managed,
    _nothing_short,
    _no_budget,
    _one_line,
    _modelled,
)


def advice(facts: Facts) -> list[Advice]:
    """All advice that applies, what is worth a change first."""
    said = [it for rule in _RULES if (it := rule(facts)) is not None]
    order = ("act", "good", "note")
    return sorted(said, key=lambda it: order.index(it.kind))
