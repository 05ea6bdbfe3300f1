"""`optimizer="auto"`: defers updates once memory is short, and returns where updates in place are faster."""

from __future__ import annotations

import itertools
import statistics
import threading
import weakref

import torch
from torch.optim.optimizer import Optimizer

from torch_uvm import _C
from torch_uvm._util.log import log

#: Steps until the engine has a schedule for the new order of operators, and follows it.
SETTLING = 7
#: Steps after which times are taken even if the engine's schedule is not final.
LONGEST_SETTLING = 60
#: Steps that are timed.
MEASURED = 7
#: Steps in a row of another optimizer after which that one counts: the first is alive, but no longer used.
#: Another thread may take many while the first one is under way: LONGEST_SETTLING count there.
OTHERS = 4
#: Steps in place that end their trial if each takes longer than deferred ones.
ENOUGH = 2
#: Deferred steps that take at most this multiple of their prediction are kept: by all plans so far, updates
#: in place take longer. Others have costs that no prediction knows, such as the host's.
LATE = 1.1


class Trial:
    """Decides for each step of a program whether its updates are deferred.

    A step lasts from one step of an optimizer to its next. The first optimizer on an accelerator counts,
    while it is used; others follow. Nothing is deferred before the engine moves bytes, nor steps in a
    backward: they free gradients early, and would no longer. Steps in place are tried if deferred ones are
    late.

    Attributes:
        defers: whether the step that begins defers its updates.
        decided: whether later steps have the kind of updates that `defers` says.
    """

    def __init__(self) -> None:
        self.defers = False
        self._start(None)

    def _start(self, optimizer: Optimizer | None) -> None:
        self._return()
        self.decided = False
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._thread = threading.get_ident()
        self._total = 0  # steps since the first deferred one
        self._step = 0  # of this kind of update
        self._other: weakref.ref[Optimizer] | None = None  # took the latest step, if not this one
        self._others = 0  # steps in a row that it took
        self._moved: int | None = None  # bytes so far
        self._still = 0  # steps since bytes moved
        self._has_returned = False  # to updates in place, because nothing moved
        self._events: dict[bool, list[torch.Event]] = {True: [], False: []}
        self._operators = 0  # that began before the first event of deferred steps; then those between all

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        counted = None if self._optimizer is None else self._optimizer()
        if counted is None:
            self._start(optimizer)
        elif self.decided or (counted is not optimizer and not self._replaces(optimizer)):
            return
        self._other = None
        device = _device_of(optimizer)
        if device is None:
            self._start(None)
        elif not is_in_backward() and not _is_capturing(device):
            moves = self._moves()
            self._still = 0 if moves else self._still + 1
            if self._total == 0:
                self.defers = moves
            elif self.defers and self._still >= MEASURED and not self._has_returned:
                # It fits after all: perhaps only making the model was short of memory. One step may fit, too.
                # If memory is short again, it fits since deferred updates have their temporaries one by one.
                self._start(optimizer)
                self._has_returned = True
            if self._total > 0 or self.defers:
                self._go_on(device)

    def _replaces(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer than the counted one counts from now on: only it has stepped lately."""
        same = self._other is not None and self._other() is optimizer
        self._other, self._others = weakref.ref(optimizer), self._others + 1 if same else 1
        if self._others < (OTHERS if self._thread == threading.get_ident() else LONGEST_SETTLING):
            return False
        self._start(optimizer)
        return True

    def _moves(self) -> bool:
        """Whether the engine has moved bytes, or let operators use them across the link, in the last step."""
        stats = _C.residency_stats()
        moved = sum(int(stats[kind]["bytes"]) for kind in ("fetched", "written_back", "used_in_place"))
        before, self._moved = self._moved, moved
        return before is not None and moved != before

    def _go_on(self, device: torch.device) -> None:
        events = self._events[self.defers]
        self._total += 1
        self._step += 1
        if len(events) <= MEASURED and (events or self._has_settled()):
            event = torch.Event(device, enable_timing=True)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)
            if self.defers and len(events) in (1, MEASURED + 1):
                stats = _C.residency_stats()
                self._operators = stats["plan_hits"] + stats["plan_misses"] - self._operators
            if not self.defers:
                done = [each for each in events if each.query()]
                if len(done) > ENOUGH and min(_times(done)) > self._ms(True):
                    self._events[False] = done
                    self._decide()
        elif len(events) > MEASURED and events[-1].query():
            if not self.defers or self._is_on_time():
                self._decide()
            else:
                self._return()
                self._step = 1  # this one

    def _return(self) -> None:
        if self.defers:
            self.defers = False
            _C.stop_deferring()

    def _has_settled(self) -> bool:
        is_even = self._total % 2 == 0  # so that two batch shapes in turn fall alike
        is_final = self._step > SETTLING and _C.predicted_ms_per_operator() is not None
        return is_even and (is_final or self._step > LONGEST_SETTLING)

    def _is_on_time(self) -> bool:
        predicted = (_C.predicted_ms_per_operator() or 0) * self._operators / MEASURED
        return self._ms(True) <= LATE * predicted

    def _ms(self, defers: bool) -> float:
        return statistics.median(_times(self._events[defers]))

    def _decide(self) -> None:
        in_place = None if self.defers else self._ms(False)
        deferred = self._ms(True)
        self.defers = in_place is None or deferred <= in_place
        self.decided = True
        self._events = {True: [], False: []}
        log.info(
            "optimizer auto: %s; a step took %.1f ms deferred%s",
            "deferred" if self.defers else "in place",
            deferred,
            ", as predicted" if in_place is None else f", {in_place:.1f} ms in place",
        )


def _times(events: list[torch.Event]) -> list[float]:
    """Milliseconds of the steps between events."""
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


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
