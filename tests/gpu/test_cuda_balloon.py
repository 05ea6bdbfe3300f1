"""The automatic budget on a card made small: plain memory takes all but 8 GiB of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from _spawn import Spawn

import torch_uvm

PROGRAM = Path(__file__).resolve().parent.parent / "_balloon.py"


@pytest.mark.timeout(240)
@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="beside a balloon there is no room for the tests of other workers",
)
def test_training_beside_a_balloon(spawn: Spawn) -> None:
    """Runs the program's loops. It exits with 1 if a promise is broken."""
    torch.cuda.empty_cache()
    torch_uvm.memory.empty_cache()
    spawn(args=[str(PROGRAM), "out.json"], timeout=200)
    found = json.loads((spawn.folder / "out.json").read_text())
    assert all(found["promises"].values())
    assert found["budget"] < found["limit"] <= found["free_beside_the_balloon"] // 2
