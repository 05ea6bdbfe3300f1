"""When a card would have run the operators of a dry run, and when the host would have queued them.

The host's costs are in units of `Card.host_us`, which is 8 on the host of benchmarks/traces/index.json: they
fit its steps in core. Other hosts with the same GPUs take up to 1.5 times as long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import torch

#: An operator that Python calls in training: its module, its dispatch, its node of the backward graph.
PYTHON = 2.9
#: The same where no gradients are recorded. Fits a step that generates, and trains on the result.
NO_GRAD = 1.8
#: An operator that the backward graph calls.
BACKWARD = 2.3
#: A view, in units of the operator that would be in its place.
VIEW = 0.3
#: A convolution, likewise: its algorithm is looked up.
CONVOLUTION = 3.4
#: What hooks on saved tensors add at each operator, such as those of activation checkpointing.
HOOKS = 1.0
#: What new hooks add: a checkpointed block sets them in its forward, and again when that is repeated.
NEW_HOOKS = 100
#: What each tensor of a list adds: an optimizer's Python handles every parameter.
LISTED = 0.17
#: What each kernel after an operator's first adds.
LAUNCH = 0.5

_TOLD = 64  # operators between two calls for progress
_FOLDER = __file__.rpartition("/")[0] + "/"
_BETWEEN = (_FOLDER, "/torch/_compile.py", "/torch/_dynamo/eval_frame.py", "/torch/utils/_python_dispatch.py")


@dataclass(frozen=True)
class Kernel:
    """An operator that the host queued.

    Args:
        began_us: when it ran dry, by the clock of traces.
        device_us: what it takes on each card.
        host: what it takes on the host, in units of `Card.host_us`.
        waits: the host waits for its end.
    """

    began_us: float
    device_us: tuple[float, ...]
    host: float
    waits: bool


class Timeline:
    """The operators of a run, in order."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.progress: Callable[[], object] = lambda: None  #: called now and then
        self._host = 0.0
        self._hooks: object = None  # kept, so that no new ones have its address

    def view(self) -> None:
        """The host makes a view."""
        self._host += VIEW * _issue()

    def kernel(
        self,
        device_us: tuple[float, ...],
        *,
        waits: bool,
        began_ns: int,
        is_convolution: bool = False,
        listed: int = 0,
        launches: int = 1,
    ) -> None:
        """The host queues an operator: see `Kernel`.

        Args:
            began_ns: when it began, dry, by the monotonic clock.
            listed: how many tensors its first list has.
            launches: how many kernels it has.
        """
        host = self._host + _issue() * (CONVOLUTION if is_convolution else 1) + LISTED * listed
        host += LAUNCH * (launches - 1)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            host += HOOKS + (NEW_HOOKS if hooks[0] is not self._hooks else 0)
            self._hooks = hooks[0]
        self.kernels.append(Kernel(began_ns / 1e3, device_us, host, waits))
        self._host = 0.0
        if len(self.kernels) % _TOLD == 0:
            self.progress()

    def wait(self) -> None:
        """The host waits for the device."""
        self.kernels.append(Kernel(time.monotonic_ns() / 1e3, (), self._host, waits=True))
        self._host = 0.0


def _issue() -> float:
    """What an operator of this thread costs the host. Python may call those of a backward pass, too."""
    if torch._C._current_graph_task_id() == -1:
        return PYTHON if torch.is_grad_enabled() else NO_GRAD
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_FOLDER) and not file.endswith(_BETWEEN):
            return PYTHON
        frame = frame.f_back
    return BACKWARD


def durations_us(
    kernels: Sequence[Kernel], begins_us: Sequence[float], host_us: float, card: int = 0
) -> list[float]:
    """By operator of a trace, how long the device is busy with it or waits for the host to queue it.

    The host queues operators one after the other; the device runs them in order, each once it is queued.

    Args:
        kernels: those of the run, in order; the ones before the first operator count for nothing.
        begins_us: when each operator began, in order.
        host_us: the unit of the kernels' ``host``.
        card: its number among those of the kernels' ``device_us``.
    """
    found = [0.0] * len(begins_us)
    at = -1
    host = device = 0.0
    for kernel in kernels:
        while at + 1 < len(begins_us) and begins_us[at + 1] <= kernel.began_us:
            at += 1
        if at < 0:
            continue
        host += kernel.host * host_us
        end = max(host, device) + (kernel.device_us[card] if kernel.device_us else 0.0)
        found[at] += end - device
        device = end
        if kernel.waits:
            host = max(host, device)
    return found
