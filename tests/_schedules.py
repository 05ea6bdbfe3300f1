"""Runs one program under many schedules of delayed work and collects the errors that it observes."""

from __future__ import annotations

from _spawn import Spawn

# One process per seed, for 20 seeds, forked before the accelerator is used. `trial()` returns a set of flags,
# one per observed error. The union over all seeds is printed.
EACH_SEED = """
import os, torch, torch_uvm
emu = torch.get_device_module("emu")

def seeds(trial, devices, count=20):
    some = 0
    for seed in range(count):
        child = os.fork()
        if child == 0:
            try:
                torch_uvm.emulated.configure(seed=seed, devices=devices)
                flags = trial()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(255)
            os._exit(flags)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert 0 <= status < 255, (seed, status)
        some |= status
    return some
"""


def across_seeds(spawn: Spawn, trial: str, devices: int = 1, count: int = 20) -> int:
    """The flags that `trial`, the body of a function, returns for any of 20 schedules, or of `count`."""
    lines = "\n".join("    " + line for line in trial.strip("\n").splitlines())
    code = f"{EACH_SEED}\ndef trial():\n    if True:\n{lines}\nprint(seeds(trial, {devices}, {count}))\n"
    return int(spawn(code).stdout)
