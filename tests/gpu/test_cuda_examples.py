"""The examples on a GPU: the LoRA fine-tune, also resumed from a checkpoint; the embedding table; one
array."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _cuda import MIB
from _spawn import Spawn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BUDGET = 160 * MIB
LARGE = ["--layers=8", "--width=512", "--batch=8", "--context=256", "--steps=6", "--save-steps=3"]
MISSING = [
    name
    for name in ("transformers", "accelerate", "peft", "tqdm", "numpy")
    if importlib.util.find_spec(name) is None
]

# The script's peak of PyTorch's own device memory.
PEAK = """
    import runpy, sys, torch
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, script.rpartition("/")[0])
    runpy.run_path(script, run_name="__main__")
    print("peak:", torch.accelerator.max_memory_allocated())
"""


class Runs:
    """Runs of the training script: the files that each wrote, and its output."""

    def __init__(self, spawn: Spawn) -> None:
        self.spawn = spawn

    def __call__(self, name: str, *more: str, budget: int | None = None) -> dict[str, Any]:
        arguments = [
            str(EXAMPLES / "finetune_lora.py"),
            *LARGE,
            f"--output={name}",
            f"--json={name}.json",
            *more,
        ]
        launcher = ["-m", "torch_uvm", "run", f"--budget={budget}", f"--stats={name}-stats.json"]
        code, args = (PEAK, arguments) if budget is None else (None, [*launcher, *arguments])
        done = self.spawn(code, args=args, env={"HF_HUB_OFFLINE": "1"}, timeout=300)
        written: dict[str, Any] = json.loads((self.spawn.folder / f"{name}.json").read_text())
        if budget is None:
            return written | {"peak": int(done.stdout.rpartition("peak:")[2])}
        return written | {"stats": json.loads((self.spawn.folder / f"{name}-stats.json").read_text())}


@pytest.fixture
def runs(spawn: Spawn) -> Iterator[Runs]:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    yield Runs(spawn)


@pytest.mark.timeout(600)
def test_lora_under_a_budget_and_on_from_a_checkpoint(runs: Runs) -> None:
    plain, again = runs("plain"), runs("again")
    managed = runs("managed", budget=BUDGET)
    resumed = runs("resumed", "--resume=managed/checkpoint-3", budget=BUDGET)
    assert {run["device"] for run in (plain, managed, resumed)} == {"cuda:0"}
    assert BUDGET < plain["peak"]
    residency = managed["stats"]["residency"]
    assert residency["fetched"]["count"] > 0 and residency["failures"] == 0
    assert residency["over_budget"] > 0 or max(residency["peak_device_bytes"].values()) <= BUDGET
    assert list(resumed["losses_hex"]) == ["4", "5", "6"]
    if plain["losses_hex"] == again["losses_hex"]:
        assert managed["losses_hex"] == plain["losses_hex"]
        assert managed["trained_sha256"] == plain["trained_sha256"] == resumed["trained_sha256"]
        assert resumed["losses_hex"].items() <= managed["losses_hex"].items()
    else:  # the libraries' kernels are not deterministic on this GPU; the differences are rounding errors
        for step, loss in plain["losses_hex"].items():
            expected = pytest.approx(float.fromhex(loss), rel=1e-3)
            assert float.fromhex(managed["losses_hex"][step]) == expected
            assert float.fromhex(resumed["losses_hex"].get(step, loss)) == expected


def test_embedding_table(spawn: Spawn) -> None:
    """All ways produce the same table, which the script checks. Times are not checked."""
    if importlib.util.find_spec("tqdm") is None:
        pytest.skip("not installed: tqdm")
    script = str(EXAMPLES / "embedding_table.py")
    done = spawn(args=[script, "--size=64", "--steps=2", "--json=figures.json"])
    assert "All ways gave the same losses and the same table, to the last bit." in done.stdout
    figures = json.loads((spawn.folder / "figures.json").read_text())
    assert figures["device"].startswith("cuda") and figures["budget"] < figures["table_bytes"]
    for cases in figures["steps"].values():
        assert all(cost["milliseconds"] > 0 for cost in cases.values())


def test_one_array(spawn: Spawn) -> None:
    """By CUDA's array interface, and by CuPy if it is installed. The script checks that no library copies."""
    if importlib.util.find_spec("numpy") is None:
        pytest.skip("not installed: numpy")
    printed = spawn(args=[str(EXAMPLES / "one_array.py")]).stdout
    has_cupy = importlib.util.find_spec("cupy") is not None
    assert f"All of them see {1_111_111 if has_cupy else 11_111:,}, and no byte was copied." in printed
    assert printed.count("left out: ") == (0 if has_cupy else 2)
