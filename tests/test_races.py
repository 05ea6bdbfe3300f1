"""Programs under a budget and under schedules of delayed work (_races.py): none sees a wrong value."""

from __future__ import annotations

from pathlib import Path

import _races  # noqa: F401  (its programs)
import pytest
from _race_registry import RACES
from _spawn import Spawn

SCRIPT = str(Path(__file__).parent / "_races.py")


@pytest.mark.parametrize("name", RACES)
def test_race(spawn: Spawn, name: str) -> None:
    done = spawn(args=[SCRIPT, name], env={"TORCH_UVM_DEVICE": "emu"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
