"""When a card would have run the operators of a dry run, and when the host would have queued them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Of the time that a Python operator takes on the host: a view, and an operator of a backward pass, which no
#: Python calls.
VIEW = 0.3
BACKWARD = 0.5


@dataclass(frozen=True)
class Kernel:
    """An operator that the host queued.

    Args:
        began_us: when it ran dry, by the clock of traces.
        device_us: what it takes on the device.
        host: what it takes on the host, in units of `Card.host_us`.
        waits: the host waits for its end.
    """

    began_us: float
    device_us: float
    host: float
    waits: bool


class Timeline:
    """The operators of a run, in order."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self._host = 0.0

    def view(self) -> None:
        """The host makes a view."""
        self._host += VIEW * _share()

    def kernel(self, began_ns: int, device_us: float, *, waits: bool) -> None:
        """The host queues an operator that began, dry, at that time of the monotonic clock."""
        self.kernels.append(Kernel(began_ns / 1e3, device_us, self._host + _share(), waits))
        self._host = 0.0


def _share() -> float:
    return BACKWARD if torch._C._current_graph_task_id() != -1 else 1.0


def durations_us(kernels: Sequence[Kernel], begins_us: Sequence[float], host_us: float) -> list[float]:
    """By operator of a trace, how long the device is busy with it or waits for the host to queue it.

    The host queues operators one after the other; the device runs them in order, each once it is queued.

    Args:
        kernels: those of the run, in order; the ones before the first operator count for nothing.
        begins_us: when each operator began, in order.
        host_us: of one operator on the host.
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
        end = max(host, device) + kernel.device_us
        found[at] += end - device
        device = end
        if kernel.waits:
            host = max(host, device)
    return found
