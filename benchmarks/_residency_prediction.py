"""What `python -m torch_uvm plan` would say of a row, from a trace in core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torch_uvm._tools.card_files import card_names, load_card
from torch_uvm._tools.plans import DEFERRED, IN_PLACE, Loop
from torch_uvm.traces import read_trace

USUAL = "h200"


def card_of(device: torch.device) -> str:
    """The profile of the device's card; that of an H200 where it is not known, as in rehearsals."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else USUAL
    return next((card for card in card_names() if card in name.replace(" ", "")), USUAL)


def predicted(trace: Path, device: torch.device, budget: int, optimizer: str) -> dict[str, Any]:
    """The step within the budget and the step in core, both by the trace, in ms.

    `step_ms` is None, and `note` says why, if there is no prediction.
    """
    try:
        loop = Loop(read_trace(trace), load_card(card_of(device)))
    except ValueError as error:  # no iteration repeats
        return {"step_ms": None, "note": str(error)}
    point = loop.point(budget, DEFERRED if optimizer == "deferred" else IN_PLACE)
    return {"step_ms": point.step_ms, "traced_ms": loop.in_core_ms, "note": point.note}
