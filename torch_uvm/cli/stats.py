"""What ``python -m torch_uvm run --stats FILE`` writes when the script is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from torch_uvm import _C


def collect_stats() -> dict[str, Any]:
    """Memory statistics and, on the emulated accelerator, its counters and timelines, as plain data.

    Returns:
        ``backend``: "emulated", "cuda" or "none". ``limit``, ``managed_bytes``, ``peak_managed_bytes``:
        managed memory taken from the runtime, in bytes. ``memory``: as `torch_uvm.memory.memory_stats`,
        over all homes. ``residency``: as `torch_uvm.stats`, with devices by their index.
        ``emulated``: None, or a dictionary with ``time_us`` (modelled), ``counters`` of all devices
        together, and ``devices``: for each its ``memory`` in bytes, ``counters``, ``resident_bytes``,
        ``peak_resident_bytes``, and ``timeline``, a list of [modelled microseconds, resident managed
        bytes, plain device bytes, managed bytes in all].
    """
    backend = _C.backend()
    return {
        "backend": backend,
        "limit": _C.get_limit(),
        "managed_bytes": _C.managed_bytes(),
        "peak_managed_bytes": _C.peak_managed_bytes(),
        "memory": dict(_C.memory_stats(None)),
        "residency": dict(_C.residency_stats()),
        "emulated": _emulated() if backend == "emulated" else None,
    }


def write_stats(path: Path) -> None:
    """Writes `collect_stats` as JSON to ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(collect_stats()) + "\n")


def _emulated() -> dict[str, Any]:
    devices = [
        {
            "index": index,
            "memory": _C.device_properties(index)["total_memory"],
            "counters": dict(_C.emu_counters(index)),
            "resident_bytes": _C.emu_resident_bytes(index),
            "peak_resident_bytes": _C.emu_peak_resident_bytes(index),
            "timeline": [list(sample) for sample in _C.emu_timeline(index)],
        }
        for index in range(torch.accelerator.device_count())
    ]
    return {"time_us": _C.emu_time_us(), "counters": dict(_C.emu_counters(None)), "devices": devices}
