"""All workloads of the residency benchmarks, by name."""

from __future__ import annotations

import _residency_workloads
import _schedule_workloads
import torch
from _residency_workloads import SEED, Workload

WORKLOADS = _residency_workloads.WORKLOADS | _schedule_workloads.WORKLOADS
# The same workloads in a few MiB, for rehearsals without a GPU.
SMALL = _residency_workloads.SMALL | _schedule_workloads.SMALL


def make(name: str, device: torch.device, small: bool = False) -> Workload:
    """Makes a seeded workload on the device. Its random numbers are its own and need no transfer.

    Raises:
        NotHere: a package is missing.
    """
    torch.manual_seed(SEED)
    with torch.device(device):
        return (SMALL if small else WORKLOADS)[name].make(device)
