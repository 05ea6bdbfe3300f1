"""Programs on the emulated profiles of machines on which host and devices have one memory.

Each runs in a process of its own, as the profile is fixed by the first use of the device.
"""

from __future__ import annotations

import pytest
from _spawn import Run, Spawn

PROFILES = ("gb10", "gh200")
PRELUDE = """
import gc, os, unittest, warnings
import torch, torch_uvm
from torch_uvm import _C
MiB = 1 << 20
raises = unittest.TestCase().assertRaisesRegex

def moved():
    seen = torch_uvm.emulated.counters()
    of_moves = "bytes_to_device bytes_to_host prefetch_calls copy_calls evicted_pages".split()
    return {key: seen[key] for key in seen if seen[key] and ("copied" in key or key in of_moves)}

def anonymous():
    '''Bytes of this process that no file backs.'''
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def managed_bytes():
    return torch_uvm.memory.memory_allocated(), torch_uvm.memory.memory_reserved(), _C.managed_bytes()
"""


@pytest.fixture(name="on_profile")
def run_on_profile(spawn: Spawn, profile: str) -> Run:
    env = {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": f"emulated_profile:{profile}"}
    return spawn.after(PRELUDE, env=env)
