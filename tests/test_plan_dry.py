"""`python -m torch_uvm plan SCRIPT`: from a dry run, without a device."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from _spawn import Spawn

HEAD = """
import sys
import torch
from torch import nn

device = torch.accelerator.current_accelerator()
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
"""
LOOP = """
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    x = torch.randn(1024, 2048, device=device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


def plan(
    folder: Path, text: str, *options: str, arguments: tuple[str, ...] = (), ranks: int = 0
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks else []
    command = [*launch, "-m", "torch_uvm", "plan", *options, "train.py", *arguments]
    return Spawn(folder)(args=command, check=False, timeout=600)


def test_an_unchanged_script(tmp_path: Path) -> None:
    """Weights of 64 MiB, with gradients and two moments, on a card and within two budgets."""
    done = plan(tmp_path, HEAD + LOOP, "--card", "t4", "--budgets", "300MiB,180MiB", "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert found["of"] == "train.py" and found["card"] == "t4" and found["fits"]
    # Four layers' activations and the batch, 8 MiB each, come in addition.
    assert 256 << 20 < found["peak_bytes"] < 350 << 20
    steps = [it["step_ms"] for it in found["points"]]
    assert found["in_core_ms"] * 0.999 < steps[0] < steps[1]
    assert {it["what"]: it["bytes"] >> 20 for it in found["at_peak"]}["optimizer state"] == 128
    (line,) = [it for it in found["by_line"] if it["what"].startswith("train.py:14 ")]
    assert line["bytes"] >> 20 == 128
    assert [it["what"] for it in found["stand_ins"]] == ["item"]
    assert {it["optimizer"] for it in found["points"]} <= {"in place", "deferred"}
    assert "train.py:14" in done.stdout and "knee" in done.stdout


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (
            "raise ValueError('no data')",
            (),
            ["ValueError: no data at train.py:1. Run the script without plan", "line 1"],
        ),
        (HEAD + "torch.cuda.CUDAGraph()", (), ["at train.py:9", "needs a real GPU", "--from"]),
        ("raise SystemExit(3)", (), ["exited with status 3"]),
        ("print('done')", (), ["used no accelerator", "done"]),
        (HEAD + LOOP, ("2",), ["ended after 2 steps", "needs 3", "Let it run longer"]),
        (
            HEAD + LOOP.replace("loss = model", "for _ in range(step): x = x * 2\n    loss = model"),
            (),
            ["no iteration that repeats", "16 steps were run", "--steps 64", "pad"],
        ),
        (
            HEAD + LOOP.replace("optimizer.zero", "for _ in range(50 + step): x = x * 2\n    optimizer.zero"),
            (),
            ["what repeats is a part of a step", "16 steps were run"],
        ),
    ],
)
def test_a_script_without_a_plan_says_what_to_do(
    text: str, arguments: tuple[str, ...], said: list[str], tmp_path: Path
) -> None:
    done = plan(tmp_path, text, "--card", "t4", arguments=arguments)
    assert done.returncode == 1
    assert all(it in done.stderr for it in said), done.stderr
    assert "usage:" not in done.stderr and "torch_uvm/cli" not in done.stderr


def test_names_of_cuda_and_an_optimizer_of_single_tensors(tmp_path: Path) -> None:
    """Roles are found without the names of lists of tensors."""
    text = HEAD.replace("torch.accelerator.current_accelerator()", 'torch.device("cuda")')
    text = text.replace("fused=True", "foreach=False")
    loop = LOOP.replace("device=device)", 'device=device, generator=torch.Generator("cuda"))')
    loop = loop.replace("    loss.backward()", '    torch.cuda.nvtx.range_push("b")\n    loss.backward()')
    done = plan(tmp_path, text + loop, "--budgets", "0.3GiB", "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    sizes = {it["what"]: it["bytes"] >> 20 for it in found["at_peak"]}
    assert sizes["parameters"] >= 64 and sizes["optimizer state"] >= 96 and sizes["gradients"] >= 56
    assert [it["budget"] for it in found["points"]] == [int(0.3 * (1 << 30))]


def test_a_budget_below_the_largest_operator(tmp_path: Path) -> None:
    done = plan(tmp_path, HEAD + LOOP, "--card", "t4", "--budgets", "1MiB")
    assert done.returncode == 2
    assert "is too little for" in done.stderr and "smaller batch" in done.stderr


def test_ranks_of_torchrun(tmp_path: Path) -> None:
    """The second rank has twice the batch."""
    ranks = """
import os
import torch.distributed as dist
dist.init_process_group()
model = nn.parallel.DistributedDataParallel(model)
"""
    loop = LOOP.replace("randn(1024", "randn(1024 * (1 + dist.get_rank())")
    done = plan(
        tmp_path, HEAD + ranks + loop, "--card", "t4", "--budgets", "1GiB", "--json", "plan.json", ranks=2
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads((tmp_path / f"plan.rank{rank}.json").read_text())["plans"][0] for rank in range(2)
    )
    assert first["in_core_ms"] < second["in_core_ms"] and first["peak_bytes"] < second["peak_bytes"]
    assert done.stdout.count("plan of") == 2 and done.stdout.count("of rank 1") == 1


def test_several_cards(tmp_path: Path) -> None:
    """A table, and the smallest card that is fast enough. The dry run is made once."""
    description = {
        "format": "torch_uvm card",
        "version": 1,
        "flops": {"float32": 1e12},
        "memory_rate": 1e12,
        "launch_us": 1,
        "host_us": 1,
        "link": {"into": 1e10, "out": 1e10, "in_place": 1e10},
    }
    for name, memory in {"tiny": 20 << 20, "small": 260 << 20, "large": 2 << 30}.items():
        card = description | {"name": name, "memory_bytes": memory}
        (tmp_path / f"{name}.json").write_text(json.dumps(card))
    count = "import pathlib; pathlib.Path('runs').open('a').write('.')\n"
    cards = "large.json,t4,small.json,tiny.json"
    done = plan(tmp_path, count + HEAD + LOOP, "--cards", cards, "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs").read_text() == "."
    written = json.loads((tmp_path / "plan.json").read_text())
    large, t4, small, tiny = written["plans"]
    assert [it["card"] for it in written["plans"]] == ["large", "t4", "small", "tiny"]
    assert large["fits"] and t4["fits"] and not small["fits"] and not tiny["fits"]
    assert large["in_core_ms"] == pytest.approx(small["in_core_ms"], rel=0.01)  # but for its memory the same
    assert t4["in_core_ms"] < 0.5 * large["in_core_ms"]
    assert small["points"][0]["step_ms"] > small["in_core_ms"]
    assert written["smallest"] == "small"
    table = {it.split()[0]: it for it in done.stdout.splitlines() if it}
    assert "yes" in table["large"] and "no" in table["small"] and "cannot run" in table["tiny"]
    assert done.stdout.splitlines()[-1].startswith("smallest      small, at a step of at most 1.2 times")


def test_several_cards_are_for_a_script(tmp_path: Path) -> None:
    done = plan(tmp_path, HEAD, "--cards", "t4,h100", "--from", "a.trace")
    assert done.returncode == 2 and "--cards needs a script" in done.stderr
    done = plan(tmp_path, HEAD, "--cards", "t4,h10")
    assert done.returncode == 2 and "did you mean h100" in done.stderr


def test_a_script_that_uses_next_to_nothing(tmp_path: Path) -> None:
    done = plan(tmp_path, (HEAD + LOOP).replace("2048", "64").replace("1024", "4"))
    assert done.returncode != 0
    assert "256 KiB" in done.stderr and "Traceback" not in done.stderr
