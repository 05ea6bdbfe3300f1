"""Advice from a plan: what would lower the peak, or the step, by how much, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from torch_uvm import _C
from torch_uvm._tools.plans import IN_PLACE, Plan

_WORTH = 0.1  # of the peak: less is not worth a line


def advice(plan: Plan, knows_deferred: bool, is_estimate: bool) -> list[str]:
    """Sentences, the most useful first. None on batch sizes, if the peak is an estimate."""
    batch = () if is_estimate else _batch(plan)
    return [*_budget(plan), *_optimizer(plan, knows_deferred), *_checkpointing(plan), *batch]


def _budget(plan: Plan) -> Iterator[str]:
    size = _C.format_bytes
    if plan.fits:
        yield "It fits: no budget is needed."
        return
    point = plan.at_room()
    if point is not None and point.step_ms is not None:
        yield (
            f"On this card: python -m torch_uvm run SCRIPT. Its budget would be {size(plan.room_bytes)}, "
            f"and a step {point.step_ms:.1f} ms, {point.step_ms / plan.loop.in_core_ms:.2f} times in core."
        )
    elif plan.loop.least_bytes > plan.room_bytes:
        name = plan.loop.memory.largest_operator[1]
        yield (
            f"It cannot run on this card: one operator, {name}, needs {size(plan.loop.least_bytes)}. "
            f"Make its operands smaller: a smaller batch, or the work in pieces."
        )


def _optimizer(plan: Plan, knows_deferred: bool) -> Iterator[str]:
    moving = [it for it in plan.points if it.step_ms is not None and it.in_place > 0]
    if knows_deferred:
        in_place = [it for it in plan.points if it.step_ms and it.into + it.out and it.optimizer == IN_PLACE]
        if in_place:
            sizes = ", ".join(_C.format_bytes(it.budget) for it in in_place)
            yield f'optimizer="in_place" is faster at {sizes}. The default, "auto", defers updates there.'
    elif moving and plan.loop.memory.updated_in_place:
        point = moving[0]
        each_way = point.in_place / (plan.loop.card.in_place_written or plan.loop.card.in_place) * 1e3
        yield (
            f"At {_C.format_bytes(point.budget)} the optimizer uses {_C.format_bytes(point.in_place)} on the "
            f'host, {each_way:.1f} ms of the step. The default, optimizer="auto", overlaps such updates with '
            f"the forward. A plan knows by how much for fused optimizers (fused=True)."
        )


def _checkpointing(plan: Plan) -> Iterator[str]:
    kept = plan.loop.memory.activations
    if kept > _WORTH * plan.peak_bytes:
        yield (
            f"At the peak, {_C.format_bytes(kept)} are kept for the backward. Activation checkpointing saves "
            f"most of it (all but the inputs of its blocks), and runs the forward twice."
        )


def _batch(plan: Plan) -> Iterator[str]:
    """The part of a batch that fits, if all that a step makes grows with the batch, and nothing else does."""
    grows = plan.loop.memory.activations_made
    fixed = plan.peak_bytes - grows
    if grows < _WORTH * plan.peak_bytes or fixed >= plan.room_bytes:
        return
    part = (plan.room_bytes - fixed) / grows
    grow = f"if the {_C.format_bytes(grows)} that a step makes beside gradients grow with the batch"
    if part < 1:
        yield f"A batch {part:.2f} times as large would fit without a budget, {grow}."
    elif part > 1.5:
        yield f"A batch {part:.{1 if part < 10 else 0}f} times as large would still fit, {grow}."
