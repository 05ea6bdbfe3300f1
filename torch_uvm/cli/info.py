"""`python -m torch_uvm info`: what is here, and what every option is set to."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from typing import Any

import torch

import torch_uvm
from torch_uvm import _C
from torch_uvm.arguments import accelerator

SUMMARY = "what is here: versions, devices, managed memory, options"

#: What a host that does not say reports as available.
_UNKNOWN_BYTES = 2**64 - 1


def _devices() -> list[dict[str, Any]]:
    here = accelerator()
    if here is None or _C.backend() == "none":
        return []
    return [
        {
            "device": f"{here.type}:{index}",
            **_C.device_properties(index),
            "budget": _C.requested_budget(index),
            "budget_bytes": _C.budget(index),
        }
        for index in range(torch.accelerator.device_count())
    ]


def _host_available() -> int | None:
    available = _C.host_memory_available()
    return None if available >= _UNKNOWN_BYTES else available


def _host_limit() -> int | None:
    value = next(option["value"] for option in _C.describe_options() if option["key"] == "host_limit")
    return None if value == "none" else _C.parse_bytes(value)


def collect() -> dict[str, Any]:
    """Everything that `info` prints; bytes as ints, None where there is no figure."""
    here = accelerator()
    return {
        "torch_uvm": torch_uvm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "built_for": "CUDA" if _C.built_with_cuda() else "CPU",
        "accelerator": None if here is None else here.type,
        "backend": _C.backend(),
        "emulated": _C.backend() == "emulated",
        "enabled": torch_uvm.is_enabled(),
        "devices": _devices(),
        "managed_bytes": _C.managed_bytes(),
        "peak_managed_bytes": _C.peak_managed_bytes(),
        "limit": _C.get_limit(),
        "host_limit": _host_limit(),
        "host_available": _host_available(),
        "options": _C.describe_options(),
    }


def _bytes(count: int | None, without: str) -> str:
    return without if count is None else _C.format_bytes(count)


def _text(facts: dict[str, Any]) -> str:
    if facts["accelerator"] is None:
        used = "none"
    else:
        used = facts["accelerator"] + (" (emulated: its figures are modelled)" if facts["emulated"] else "")
    lines = [
        f"torch_uvm {facts['torch_uvm']}, built for {facts['built_for']}; "
        f"torch {facts['torch']}, Python {facts['python']}",
        f"accelerator     {used}",
        f"switch          {'on' if facts['enabled'] else 'off'}",
        f"managed memory  {_C.format_bytes(facts['managed_bytes'])}, "
        f"at most {_C.format_bytes(facts['peak_managed_bytes'])} so far",
        f"limit           {_bytes(facts['limit'], 'none (what the host has available)')}",
        f"host limit      {_bytes(facts['host_limit'], 'none (what the host has available)')}",
        f"host available  {_bytes(facts['host_available'], 'unknown')}",
    ]
    for device in facts["devices"]:
        lines += ["", device["device"]]
        for key, value in device.items():
            if key == "device":
                continue
            if key.startswith("budget") and value is None:
                # What was asked for comes into force when the device gets managed memory.
                value = "none yet" if key == "budget_bytes" and device["budget"] != "none" else "none"
            figure = isinstance(value, int) and not isinstance(value, bool)
            shown = _C.format_bytes(value) if figure and ("memory" in key or "bytes" in key) else value
            lines.append(f"  {key:<26}{shown}")
    lines += ["", "options (TORCH_UVM_CONF=key:value,...)"]
    for option in facts["options"]:
        lines.append(f"  {option['key']:<30}{option['value']:<10}{option['description']}")
        lines.append(f"  {'':<42}default {option['default']}; accepted: {option['accepted']}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints the facts, for people or with --json as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m torch_uvm info", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object; bytes as numbers")
    arguments = parser.parse_args(argv)
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else _text(facts))
    return 0
