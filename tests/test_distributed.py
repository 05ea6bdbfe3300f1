"""torch.distributed on the emulated accelerator: gloo's collectives, DDP, FSDP2 and torchrun.

The ranks' programs are in _distributed.py, _data_parallel.py and _collectives.py;
gpu/test_cuda_fsdp.py runs them on GPUs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import _distributed
import pytest
import torch
from _ranks import LIMIT
from _spawn import Spawn

TESTS = Path(__file__).resolve().parent
EMU = {
    "TORCH_UVM_DEVICE": "emu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "USE_LIBUV": None,
}
# FSDP2 never defers steps, so on `emu` this case would repeat `fsdp`.
CASES = [case for case in _distributed.CASES if case != "fsdp_deferred"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Two processes run all cases, one after another, because starting them takes longer than most cases.

    Queued copies are delayed at random, so a collective that omits a wait gives wrong results.
    """
    folder = tmp_path_factory.mktemp("ranks")
    conf = f"limit:{LIMIT},emulated_schedule_seed:8"
    command = [str(TESTS / "_two_ranks.py"), ",".join(CASES), "emu", str(folder)]
    return Spawn(folder)(args=command, env={**EMU, "TORCH_UVM_CONF": conf}, check=False, timeout=600)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ranks: subprocess.CompletedProcess[str], case: str) -> None:
    assert f"done {case}\n" in ranks.stdout, f"{ranks.returncode}\n{ranks.stdout}\n{ranks.stderr}"


SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
for device in map(torch.device, sys.argv[1:]):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)], nn.Linear(512, 9)).to(device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(4):
        torch.manual_seed(2 * number + dist.get_rank())
        x, y = torch.randn(16, 512).to(device), torch.randint(0, 9, (16,)).to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save([p.detach().cpu() for p in model.parameters()], f"{device}.{dist.get_rank()}")
dist.barrier()  # exits without destroying the group, as many scripts do
"""
# Appended to the script: saves the figures of each rank.
FIGURES = """
import torch_uvm

torch.save(torch_uvm.stats(), f"figures.{dist.get_rank()}")
"""


def test_an_unchanged_script_under_torchrun(spawn: Spawn, tmp_path: Path) -> None:
    """Each rank stays within its budget and equals the CPU run, which has no budget."""
    (tmp_path / "script.py").write_text(SCRIPT + FIGURES)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ours = ["-m", "torch_uvm", "run", "--limit", "256MiB", "--budget", "20MiB"]  # the peak is about 30 MiB
    spawn(args=[*torchrun, *ours, "script.py", "cpu", "emu"], env=EMU)
    for rank in range(2):
        found, wanted = torch.load(tmp_path / f"emu.{rank}"), torch.load(tmp_path / f"cpu.{rank}")
        assert len(found) == len(wanted) == 14
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        figures = torch.load(tmp_path / f"figures.{rank}", weights_only=False)
        assert figures["fetched"]["bytes"] > 0 and figures["written_back"]["bytes"] > 0
