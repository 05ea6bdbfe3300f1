"""What ``python -m torch_uvm run --stats FILE`` writes when the script is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from torch_uvm import _C


def write_stats(path: Path) -> None:
    """Writes `memory_stats()` and `stats()`, and on the emulated accelerator its counters and timelines.

    Bytes, and modelled microseconds. A point of a timeline is one of `emulated.timeline`.

    Raises:
        OSError: the file cannot be written.
    """
    emulated = _C.backend() == "emulated"
    found = {
        "backend": _C.backend(),
        "limit": _C.get_limit(),
        "managed_bytes": _C.managed_bytes(),
        "peak_managed_bytes": _C.peak_managed_bytes(),
        "memory": _C.memory_stats(None),
        "residency": _C.residency_stats(),
        "emulated": _emulated() if emulated else None,
    }
    path.write_text(json.dumps(found) + "\n")


def _emulated() -> dict[str, Any]:
    devices = [
        {
            "index": index,
            "memory": _C.device_properties(index)["total_memory"],
            "counters": _C.emu_counters(index),
            "resident_bytes": _C.emu_resident_bytes(index),
            "peak_resident_bytes": _C.emu_peak_resident_bytes(index),
            "timeline": _C.emu_timeline(index),
        }
        for index in range(torch.accelerator.device_count())
    ]
    return {"time_us": _C.emu_time_us(), "counters": _C.emu_counters(None), "devices": devices}
