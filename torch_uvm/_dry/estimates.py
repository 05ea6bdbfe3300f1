"""`estimate_memory`: a plan of a model, a batch and an optimizer, for programs and notebooks."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_uvm import _C
from torch_uvm._util.arguments import byte_count, exact_keywords

_MOST_LINES = 8


@dataclass(frozen=True)
class MemoryEstimate:
    """What training needs on a card. `str` of it is a table.

    Args:
        peak_bytes: the most bytes on the device at once.
        fits: whether they fit the card, less the reserve of the budget "auto".
        is_estimate: sizes that depend on values make up more than a tenth of the peak.
        step_ms: of a step with everything on the device.
        by_category: bytes at the peak: "parameters", "gradients", "optimizer state", and results by operator.
        by_line: the most bytes that each line had at once.
        budgets: milliseconds of a step by budget in bytes; None: it does not suffice.
    """

    card: str
    peak_bytes: int
    fits: bool
    is_estimate: bool
    step_ms: float
    by_category: Mapping[str, int]
    by_line: Mapping[str, int]
    budgets: Mapping[int, float | None]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        size = _C.format_bytes
        answer = ("an estimate: " if self.is_estimate else "") + (
            "it fits" if self.fits else "it does not fit"
        )
        yield f"peak {size(self.peak_bytes)} on {self.card}: {answer}; a step takes {self.step_ms:.1f} ms"
        for title, parts in (("at the peak", self.by_category), ("by line", self.by_line)):
            yield title
            yield from (f"  {size(bytes):>11}  {what}" for what, bytes in list(parts.items())[:_MOST_LINES])
        yield "step by budget"
        for budget, ms in self.budgets.items():
            yield f"  {size(budget):>11}  {'too little' if ms is None else f'{ms:.1f} ms'}"


@exact_keywords
def estimate_memory(
    model_fn: Callable[[], nn.Module],
    sample_fn: Callable[[], Any],
    optimizer_fn: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    *,
    card: str = "h200",
    budgets: Sequence[int | str] | None = None,
) -> MemoryEstimate:
    """What a training step needs and takes on a card, without running it there (docs/plan.md).

    The functions are called in a fork of this process that does not compute. So they may be defined in a
    notebook; but the process must not have used its accelerator yet.

    Args:
        model_fn: makes the model, on any device.
        sample_fn: makes a batch: a tensor, a tuple of positional arguments or a dictionary of named ones.
        optimizer_fn: gets the parameters, and makes the optimizer.
        card: a name or a file, as of `python -m torch_uvm plan`.
        budgets: sizes for which the step is predicted. None: some, from the peak down.

    Raises:
        ValueError: an unknown card or size.
        RuntimeError: a function raised, or this process has used its accelerator.
    """
    from torch_uvm._tools.cards import load_card
    from torch_uvm._tools.dry_runs import STEPS, dry_fork
    from torch_uvm._tools.plans import loops_of, make_plan

    of = load_card(card)
    asked = None if budgets is None else [byte_count(it, "budgets") for it in budgets]
    with tempfile.TemporaryDirectory(prefix="torch_uvm-estimate-") as scratch:
        folder = Path(scratch)

        def run(progress: int, steps: int) -> None:
            from torch_uvm._dry.run import Run

            _use_the_emulated_accelerator()
            Run(folder, steps, [of], progress).run(lambda: _train(model_fn, sample_fn, optimizer_fn))

        for steps in STEPS:
            found = dry_fork(functools.partial(run, steps=steps), folder=folder)
            with contextlib.suppress(ValueError):
                (trace,) = found.loops()
                loops = loops_of(trace, of, on_gpu=False)
                break
        else:
            raise ValueError("no iteration repeats: give all batches the same shapes")
    plan = make_plan(loops, asked, peak_bytes=found.peak_bytes)
    return MemoryEstimate(
        of.name,
        plan.peak_bytes,
        plan.fits,
        found.is_estimate,
        plan.loop.in_core_ms,
        {it.what: it.bytes for it in plan.loop.memory.largest},
        {line: total[0] for line, total in found.by_line.items()},
        {it.budget: it.step_ms for it in plan.points},
    )


def _use_the_emulated_accelerator() -> None:
    """With as much memory as anyone asks for."""
    from torch_uvm._switch.switch import enable
    from torch_uvm._tools.dry_runs import options
    from torch_uvm.emulated._register import register

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    register()
    _C.load_options(options())
    enable()


def _train(
    model_fn: Callable[[], nn.Module],
    sample_fn: Callable[[], Any],
    optimizer_fn: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    device = torch.accelerator.current_accelerator()
    model = model_fn().to(device)
    optimizer = optimizer_fn(model.parameters())
    while True:  # until the run has its steps
        batch = torch.utils._pytree.tree_map_only(Tensor, lambda it: it.to(device), sample_fn())
        if isinstance(batch, Mapping):
            result = model(**batch)
        else:
            result = model(*batch) if isinstance(batch, (list, tuple)) else model(batch)
        _loss_of(result).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss_of(result: Any) -> Tensor:
    """The model's own loss; if it has none, the mean of its first result."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = [it for it in torch.utils._pytree.tree_leaves(result) if isinstance(it, Tensor)]
    if not found:
        raise TypeError(
            f"the model returned {type(result).__name__}; accepted: tensors, or a result with a loss"
        )
    return found[0].float().mean()
