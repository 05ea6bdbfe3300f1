"""A program whose operators run within others, on a stream of their own. It runs in `_races.py`."""

from __future__ import annotations

import random

import torch
from _race_registry import FLOATS, Pressure, compare, full, race


@race()
def copies_what_is_saved_for_the_backward_aside(draw: random.Random) -> str:
    """Offloads activations as torchtune and TRL do: the operator that saves them calls a hook, which copies
    them on a side stream, as they are or cloned."""
    pressure = Pressure(6, 8)
    side = torch.Stream("emu")
    copies: list[torch.Tensor] = []
    clones: list[torch.Tensor] = []  # kept, so that only evictions have to wait

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if draw.random() < 0.5:
            clones.append(saved.clone())
            saved = clones[-1]
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            copies.append(torch.empty(FLOATS).pin_memory().copy_(saved, non_blocking=True))
        return saved

    values = [10.0 + number for number in range(6)]
    given = [full(value).requires_grad_() for value in values]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        results = [it.sin() for it in given]
    for _ in range(8):
        pressure.use(draw.randrange(6))
    side.synchronize()
    del results
    return compare(copies, values, "copied in a hook") or pressure.check()
