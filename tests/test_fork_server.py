"""Programs that are forks of a process with torch: as those that were started for themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from _spawn import Spawn, may_fork

LOOK = """
import json, os, sys
before = "torch" in sys.modules, sorted(globals()), sys.argv, sys.orig_argv[1:], sys.path, os.getcwd()
os.environ["TORCH_UVM_CONF"] = "limit:1GiB"
import torch
assert torch.__spec__.name == "torch" and torch.__spec__.submodule_search_locations
import torch_uvm
after = torch_uvm.get_limit(), torch.ones(2, device="emu").tolist(), torch.randn(1, device="emu").numel()
print(json.dumps([before, after, dict(os.environ), os.listdir("/proc/self/fd")]))
"""
ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('a message')": 1,
    "raise ValueError('of the program')": 1,
    "raise KeyboardInterrupt": -2,
    "os.kill(os.getpid(), 9)": -9,
    "os._exit(5)": 5,
}
EMU = {"TORCH_UVM_DEVICE": "emu"}


def test_a_snippet_and_a_script_see_what_they_see_otherwise(spawn: Spawn) -> None:
    (spawn.folder / "look.py").write_text(LOOK)
    assert may_fork(LOOK, [], EMU)
    for code, args in ((LOOK, ["a", "-b"]), (None, ["look.py", "a", "-b"])):
        forked, started = (spawn(code, args=args, env=EMU, fork=fork) for fork in (True, False))
        assert forked.stdout == started.stdout and '"limit:1GiB"' in started.stdout


@pytest.mark.parametrize("code", ENDS)
def test_an_end_is_told(spawn: Spawn, code: str) -> None:
    done = spawn(f"import os, sys; print('begun', flush=True); {code}", check=False)
    assert (done.returncode, done.stdout) == (ENDS[code], "begun\n")
    assert ("of the program" in done.stderr) == ("of the program" in code)


def test_numbers_differ_between_programs(spawn: Spawn) -> None:
    code = "import random, torch; print(random.random(), torch.rand(1).item())"
    assert not {*spawn(code).stdout.split()} & {*spawn(code).stdout.split()}


def test_a_program_that_takes_too_long_is_ended(spawn: Spawn, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        spawn("import time; time.sleep(60)", timeout=0.5)
    assert spawn("print(1)").stdout == "1\n"


def test_what_python_reads_first_needs_a_process_of_its_own() -> None:
    assert not may_fork(LOOK, [], {"PYTHONPATH": "/"})
    assert not may_fork(LOOK, [], {"LD_PRELOAD": "libfake.so", **EMU})
    assert not may_fork(None, ["-m", "torch.distributed.run"], EMU)
