"""Counters of the emulated accelerator around one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_uvm import emulated


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """The counters that `call` changed, and by how much."""
    before = emulated.counters()
    call()
    after = emulated.counters()
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}
