"""DDP and FSDP2 over NCCL on two GPUs, with a process and a budget each. Results equal those without
torch_uvm.

The ranks' programs are in ../_distributed.py; ../test_distributed.py runs them on the emulated accelerator.
"""

from __future__ import annotations

from pathlib import Path

import _distributed
import pytest
import torch
from _ranks import LIMIT
from _spawn import Spawn

pytestmark = [
    pytest.mark.usefixtures("two_devices"),
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL"),
    pytest.mark.timeout(180),
]


CASES = {
    "ddp": ["ddp", "ddp_hook", "ddp_deferred"],
    "fsdp": ["fsdp", "fsdp_options", "fsdp_deferred", "fsdp_checkpoint"],
    "tensor parallel": ["tensor_parallel"],
    "under way": ["under_way"],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_equal_to_native_under_a_budget_for_each_rank(spawn: Spawn, tmp_path: Path, cases: list[str]) -> None:
    environment = {
        "TORCH_UVM_CONF": f"limit:{LIMIT}",
        # NVLink multicast belongs to the whole host, whose other GPUs may have other users.
        "NCCL_NVLS_ENABLE": "0",
    }
    launcher = str(Path(_distributed.__file__).with_name("_two_ranks.py"))
    done = spawn(args=[launcher, ",".join(cases), "cuda", str(tmp_path)], env=environment, timeout=170)
    assert done.stdout.split("\n")[: len(cases)] == [f"done {case}" for case in cases], done.stdout
