"""Draws five steps of training under a budget, as `python -m torch_uvm plot` does: docs/images/trace.png.

    TORCH_UVM_DEVICE=emu python benchmarks/draw_trace.py [FILE]

Parameters, gradients and moments of the ten layers are 160 MiB; the budget is 96 MiB.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import torch_uvm
from torch_uvm.cli.plot import draw
from torch_uvm.traces import Trace, read_trace


def trace_of_training(steps: int = 5) -> Trace:
    torch_uvm.enable(budget="96MiB")
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    layers = [module for _ in range(10) for module in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with torch_uvm.record_accesses(path):
            for _ in range(steps):
                model(torch.randn(1024, 1024, device=device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return read_trace(path)


if __name__ == "__main__":
    draw(trace_of_training(), Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/trace.png"))
