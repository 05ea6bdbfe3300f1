"""`optimizer="auto"`: tries updates in place and deferred ones, and keeps what gives the shorter steps."""

from __future__ import annotations

import itertools
import statistics
import weakref

import torch
from torch.optim.optimizer import Optimizer

from torch_uvm import _C
from torch_uvm._util.log import log

#: Steps until the engine has a schedule for the new order of operators, and follows it.
SETTLING = 7
#: Steps after which times are taken even if the engine has not yet chosen among its schedules.
LONGEST_SETTLING = 60
#: Steps that are timed. SETTLING + MEASURED is even, so that two batch shapes in turn fall alike.
MEASURED = 7
#: Deferred steps must be at most this part of the others: gradients live longer, and the host has more to do.
_WORTH = 0.98


class Trial:
    """Decides for each step of a program whether its updates are deferred.

    A step lasts from one step of an optimizer to its next. The first optimizer on an accelerator counts,
    while it lives; others follow. Nothing is tried before the engine moves bytes.

    Attributes:
        defers: whether the step that begins defers its updates.
        decided: whether later steps have the kind of updates that `defers` says.
    """

    def __init__(self) -> None:
        self.defers = False
        self._start(None)

    def _start(self, optimizer: Optimizer | None) -> None:
        self.defers = False
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._total = 0  # steps of the trial
        self._step = 0  # of this kind of update
        self._moved: int | None = None
        self._events: dict[bool, list[torch.Event]] = {False: [], True: []}
        self.decided = False

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        counted = None if self._optimizer is None else self._optimizer()
        if counted is None:
            self._start(optimizer)
        elif counted is not optimizer or self.decided:
            return
        device = _device_of(optimizer)
        if device is None:
            self._start(None)
        elif not _is_capturing(device) and (self._total > 0 or self._is_moving()):
            self._go_on(device)

    def _is_moving(self) -> bool:
        stats = _C.residency_stats()
        moved = sum(stats[kind]["bytes"] for kind in ("fetched", "written_back", "used_in_place"))
        before, self._moved = self._moved, moved
        return before is not None and moved != before

    def _go_on(self, device: torch.device) -> None:
        events = self._events[self.defers]
        if len(events) <= MEASURED and (events or self._has_settled()):
            event = torch.Event(device, enable_timing=True)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)
        if len(events) > MEASURED and not self.defers:
            self.defers = True
            self._step = 0
        self._step += 1
        self._total += 1
        if len(self._events[True]) > MEASURED and self._events[True][-1].query():
            self._decide()

    def _has_settled(self) -> bool:
        is_even = (self._total - SETTLING) % 2 == 0
        waited = self._step >= LONGEST_SETTLING or (self._step >= SETTLING and _C.schedules_are_settled())
        return is_even and waited

    def _decide(self) -> None:
        times = {
            defers: statistics.median([begin.elapsed_time(end) for begin, end in itertools.pairwise(events)])
            for defers, events in self._events.items()
        }
        self.defers = times[True] <= _WORTH * times[False]
        self.decided = True
        self._events = {False: [], True: []}
        log.info(
            "optimizer auto: %s; a step took %.1f ms in place, %.1f ms deferred",
            "deferred" if self.defers else "in place",
            times[False],
            times[True],
        )


def _device_of(optimizer: Optimizer) -> torch.device | None:
    """The accelerator that the optimizer's first parameter is on; None: the CPU, or there is no parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device if device.type in ("cuda", "emu") else None
    return None


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
