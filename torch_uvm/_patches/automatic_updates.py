"""`optimizer="auto"`: defers updates once memory is short."""

from __future__ import annotations

import torch
from torch.optim.optimizer import Optimizer

from torch_uvm import _C
from torch_uvm._util.log import log

#: Deferred steps in a row that move nothing, after which it fits after all.
STILL = 7


class Automatic:
    """Decides for each step of a program whether its updates are deferred.

    Nothing is deferred before the engine moves bytes, nor steps in a backward: they free gradients early, and
    would no longer. Deferred updates have their transfers beside the next forward, and their temporaries one
    by one.

    Attributes:
        defers: whether the step that begins defers its updates.
    """

    def __init__(self) -> None:
        self.defers = False
        self._moved: int | None = None  # bytes so far
        self._still = 0  # steps since bytes moved
        self._may_return = True  # to updates in place

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        device = _device_of(optimizer)
        if device is None or is_in_backward() or _is_capturing(device):
            return
        moves = self._moves()
        self._still = 0 if moves else self._still + 1
        if moves and not self.defers:
            self.defers = True
            log.info("optimizer auto: updates are deferred: memory is short")
        elif self.defers and self._still >= STILL and self._may_return:
            # Perhaps only making the model was short of memory. If memory is short again, it fits since
            # deferred updates have their temporaries one by one.
            self.defers = self._may_return = False
            _C.stop_deferring()
            log.info("optimizer auto: updates are in place: %d steps moved nothing", STILL)

    def _moves(self) -> bool:
        """Whether the engine has moved bytes, or let operators use them across the link, in the last step."""
        stats = _C.residency_stats()
        moved = sum(int(stats[kind]["bytes"]) for kind in ("fetched", "written_back", "used_in_place"))
        before, self._moved = self._moved, moved
        return before is not None and moved != before


def is_in_backward() -> bool:
    """Whether the calling thread runs a backward, such as a hook in which an optimizer steps."""
    return torch._C._current_graph_task_id() != -1


def _device_of(optimizer: Optimizer) -> torch.device | None:
    """The accelerator that the optimizer's first parameter is on; None: the CPU, or there is no parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device if device.type in ("cuda", "emu") else None
    return None


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
