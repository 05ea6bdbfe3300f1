"""DDP and FSDP2 over NCCL: two GPUs, a process and a budget each, results as with native tensors.

What the ranks do is in ../_distributed.py; on the emulated accelerator they do it in ../test_distributed.py.
"""

from __future__ import annotations

from pathlib import Path

import _distributed
import pytest
import torch
from _spawn import Spawn

pytestmark = [
    pytest.mark.usefixtures("two_devices"),
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL"),
    pytest.mark.timeout(180),
]


@pytest.mark.parametrize("case", ["ddp", "ddp_deferred", "fsdp", "fsdp_deferred", "fsdp_checkpoint"])
def test_equal_to_native_under_a_budget_for_each_rank(spawn: Spawn, tmp_path: Path, case: str) -> None:
    environment = {
        "TORCH_UVM_CONF": f"limit:{_distributed.LIMIT}",
        "NCCL_NVLS_ENABLE": "0",  # NVLink multicast is the whole host's, whose other GPUs may be others'
    }
    launcher = str(Path(_distributed.__file__).with_name("_two_ranks.py"))
    done = spawn(args=[launcher, case, "cuda", str(tmp_path)], env=environment, timeout=170)
    assert f"done {case}" in done.stdout
