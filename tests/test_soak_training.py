"""The training soak at a small scale: what `make soak-training` runs at length. Also checks that it finds
errors."""

from __future__ import annotations

import re
from pathlib import Path

from _spawn import Spawn

SOAK = str(Path(__file__).parent / "soak_training.py")
EMULATED = {"TORCH_UVM_DEVICE": "emu"}

# The tenth write of an optimizer's step has one wrong bit.
WRONG_BIT = """
import sys
import torch
sys.path.append(FOLDER)
import soak_training

state = {"steps": 0}
step = torch.optim.Optimizer.zero_grad

def zero_grad(self, *args, **kwargs):
    state["steps"] += 1
    if state["steps"] >= 10:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == "emu":
                    with torch.no_grad():
                        parameter.view(torch.int32).flatten()[0] ^= 1
    return step(self, *args, **kwargs)

torch.optim.Optimizer.zero_grad = zero_grad
sys.argv = ["soak_training.py", "--round", "3", "--steps-of-a-round", "12"]
soak_training.main()
"""


def test_some_steps(spawn: Spawn) -> None:
    args = [SOAK, "--steps", "30", "--steps-of-a-round", "15", "--seed", "1"]
    done = spawn(args=args, env=EMULATED, check=False, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    figures = re.search(r"30 steps.*'fetched': (\d+), 'written_back': (\d+).*failed: none", done.stdout)
    assert figures is not None, done.stdout
    assert int(figures[1]) > 50 and int(figures[2]) > 50


def test_one_wrong_bit_fails_and_prints_the_repeating_command(spawn: Spawn) -> None:
    code = WRONG_BIT.replace("FOLDER", repr(str(Path(__file__).parent)))
    done = spawn(code, env=EMULATED, check=False, timeout=900)
    assert done.returncode != 0
    assert "elements differ" in done.stderr
    assert "FAILED round 3" in done.stdout
