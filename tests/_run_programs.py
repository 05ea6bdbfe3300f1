"""`python _run_programs.py managed|plain` runs every program on the CPU and the accelerator, and compares.

Prints the differences. TORCH_UVM_CONF makes the devices so small that pages are evicted all the time.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from typing import Any

import _network_programs  # noqa: F401  (registers its programs)
import _special_programs  # noqa: F401  (registers its programs)
import torch
from _programs import PROGRAMS, Program, Results

import torch_uvm


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.stride() == other.stride() and torch.equal(one, other)
    return one == other or (math.isnan(one) and math.isnan(other))


def run(function: Program, device: str) -> Results:
    torch.manual_seed(3)
    return [v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in function(device)]


def main(managed: bool) -> None:
    """Prints a finding for each program: empty, a traceback, or the places that differ."""
    findings = {}
    scope = torch_uvm.enabled if managed else torch_uvm.disabled
    for name, function in PROGRAMS.items():
        try:
            expected = run(function, "cpu")
            with scope():
                found = run(function, "emu")
            pairs = enumerate(zip(expected, found, strict=True))
            differ = [index for index, (one, other) in pairs if not same(one, other)]
            findings[name] = f"results {differ} of {len(expected)} differ" if differ else ""
        except Exception:
            findings[name] = traceback.format_exc()
        findings[name] += torch_uvm._C.check_allocator() or ""
    evicted = torch_uvm.emulated.counters()["evicted_pages"]
    print(json.dumps({"findings": findings, "evicted": evicted}))


if __name__ == "__main__":
    main(sys.argv[1] == "managed")
