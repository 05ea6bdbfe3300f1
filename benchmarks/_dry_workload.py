"""A training script of one of the benchmark's workloads: `python _dry_workload.py NAME [--small]`."""

from __future__ import annotations

import sys

import _residency_workloads
import _schedule_workloads
import torch


def main() -> None:
    """Trains until it is stopped, as `record_traces.py` does."""
    name, small = sys.argv[1], "--small" in sys.argv
    modules = (_residency_workloads, _schedule_workloads)
    makers = [module.SMALL if small else module.WORKLOADS for module in modules]
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    with torch.device(device):
        made = (makers[0] | makers[1])[name].make(device)
    updates = made.optimizer(made.trained())
    while True:
        made.loss(made.model, made.batch).backward()
        updates.step()
        updates.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main()
