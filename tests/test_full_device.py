"""Memory that runs short at any moment of a program, with the default budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from _spawn import Spawn

HERE = Path(__file__).parent


@pytest.mark.parametrize("kernels", ["counted", "uncounted"])
def test_a_full_device_at_any_moment(kernels: str, spawn: Spawn) -> None:
    """Each program of _full_device.py goes on within the device's memory, with the CPU's bits."""
    spawn(args=[str(HERE / "_full_device.py"), kernels], env={"TORCH_UVM_DEVICE": "emu"})
