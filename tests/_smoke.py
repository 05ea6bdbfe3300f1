"""A program that runs where torch_uvm is installed, without the rest of the repository.

Trains two steps with less memory than they need, moves a tensor, prefetches it, and prints the results.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import torch_uvm

MIB = 1 << 20
BUDGET = 6 * MIB


def train(device: torch.device) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]  # 4 MiB; 16 MiB with gradients and AdamW's state
    model = torch.nn.Sequential(*layers).to(device)
    # Foreach operators would exceed the budget.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    losses = []
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 8 * 512).view(8, 512).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    where = Path(torch_uvm.__file__).resolve()
    assert Path(sys.prefix).resolve() in where.parents, (
        f"{where} is not the package installed in {sys.prefix}"
    )
    expected = train(torch.device("cpu"))
    torch_uvm.enable(limit="64MiB", budget=BUDGET)
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert train(device) == expected
    stats = torch_uvm.stats()
    (peak,) = stats["peak_device_bytes"].values()
    assert 0 < peak <= BUDGET and stats["fetched"]["bytes"] > 0, stats

    x = torch.arange(MIB // 8, device=device)  # 1 MiB
    y = torch_uvm.to(x, "cpu")
    y[0] = 7
    assert y.data_ptr() == x.data_ptr() and x[0].item() == 7
    torch_uvm.prefetch(y, "cpu")
    torch.accelerator.synchronize()
    assert torch_uvm.residency(x) == {torch.device("cpu"): x.nbytes}
    print(f"smoke test passed: {where.parent}, torch {torch.__version__}, {device}, {peak} bytes at the peak")


if __name__ == "__main__":
    main()
