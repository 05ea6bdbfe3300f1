"""flex_attention on the emulated accelerator: not compiled, as on the CPU without a compiler."""

from __future__ import annotations

from types import ModuleType
from typing import Any

DEVICE = "emu"


def know_the_device(flex_attention: ModuleType) -> None:
    """Lets the accelerator's tensors pass the check that names the devices which flex_attention supports.

    Without a compiler it is composed of ordinary operators and works on any device. So does its backward,
    which the check refuses the CPU alone.
    """
    check: Any = getattr(flex_attention, "_validate_device", None)
    if check is None:
        return

    def _validate_device(query: Any, *others: Any) -> None:
        if query.device.type != DEVICE:
            check(query, *others)

    flex_attention._validate_device = _validate_device  # type: ignore[attr-defined]
