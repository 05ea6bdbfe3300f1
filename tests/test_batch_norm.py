"""Batch normalisation under a budget writes to its statistics and to nothing else."""

from __future__ import annotations

import torch
import torch._inductor.compile_fx  # imports all that a call of CompiledFxGraph needs
from _compiled_graphs import (
    DEVICE,
    MIB,
    N,
    small_budget,  # noqa: F401  (every test has it)
    storages,
    use,
)

import torch_uvm


class TestBatchNorm:
    def test_writes_to_its_statistics_alone(self) -> None:
        """The schema does not declare these writes. The input and the weights stay clean."""
        channels = N // 2
        weight, bias = (torch.nn.Parameter(torch.ones(channels, device=DEVICE)) for _ in range(2))
        mean, var = (torch.zeros(channels, device=DEVICE) for _ in range(2))
        x = torch.randn(2, channels, device=DEVICE)
        kept = storages()
        torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True)
        use(kept)
        expected = mean.clone(), var.clone()
        use(kept)
        with torch.no_grad():
            torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True)
        use(kept)  # evicts the statistics
        assert not torch.equal(mean, expected[0]) and not torch.equal(var, expected[1])
        torch.testing.assert_close(mean, expected[0] * 1.9)
        stats = torch_uvm.stats()
        before = stats["written_back"]["bytes"]
        with torch.no_grad():
            result = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True)
        use([mean, var, weight, bias, x])
        del result
        use(kept)
        grown = torch_uvm.stats()["written_back"]["bytes"] - before
        assert grown <= 2 * MIB, "only the two statistics, of 0.5 MiB each, and a temporary"
