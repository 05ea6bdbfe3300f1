"""The example of Hugging Face's Trainer, accelerate and PEFT: under a budget, and resumed from a
checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _spawn import Spawn

for package in ("transformers", "accelerate", "peft"):
    pytest.importorskip(package)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = ["--steps=4", "--save-steps=2", "--layers=4", "--context=64", "--batch=2", "--data-bytes=200000"]
BUDGET = 12 << 20
# No downloads. One number of threads for all runs, because their results are compared.
ENVIRONMENT = {"TORCH_UVM_DEVICE": "emu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

# Runs the script's functions on the plain accelerator, then with a budget and resumed from a checkpoint.
PLAIN_AND_RESUMED = f"""
    import json, sys
    import torch, torch_uvm  # first: the script looks for an accelerator when it is imported
    sys.path.insert(0, {str(EXAMPLES)!r})
    import finetune_lora

    arguments = finetune_lora.parse_arguments()
    checkpoint, arguments.resume = arguments.resume, None
    plain = finetune_lora.train(arguments)
    assert not torch_uvm.is_enabled() and torch_uvm.memory.max_memory_allocated() == 0
    peak = torch.accelerator.max_memory_allocated()
    torch.accelerator.empty_cache()
    torch_uvm.enable(budget={BUDGET})
    arguments.resume = checkpoint
    resumed = finetune_lora.train(arguments)
    assert torch_uvm.stats()["fetched"]["count"] > 0
    arguments.json.write_text(json.dumps({{"plain": plain, "resumed": resumed, "peak": peak}}))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of three trainings: `plain`; `managed`, under a budget; `resumed` from a checkpoint of
    `managed`."""
    folder = tmp_path_factory.mktemp("lora")
    spawn = Spawn(folder)
    launcher = ["-m", "torch_uvm", "run", f"--budget={BUDGET}", "--stats=stats.json"]
    script = [str(EXAMPLES / "finetune_lora.py"), "--output=managed", "--json=managed.json"]
    spawn(args=[*launcher, *script, *SMALL], env=ENVIRONMENT)
    others = ["--output=others", "--json=others.json", "--resume=managed/checkpoint-2"]
    spawn(PLAIN_AND_RESUMED, args=[*others, *SMALL], env=ENVIRONMENT)
    managed, stats, rest = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("managed", "stats", "others")
    )
    return {"managed": managed, "stats": stats, "folder": folder, **rest}


def test_it_trains_on_the_accelerator(runs: dict[str, Any]) -> None:
    for run in ("plain", "managed", "resumed"):
        assert runs[run]["device"] == "emu:0"
    losses = [float.fromhex(loss) for loss in runs["plain"]["losses_hex"].values()]
    assert len(losses) == 4 and losses[3] < losses[0]


def test_a_budget_below_the_peak_gives_the_same_losses(runs: dict[str, Any]) -> None:
    assert max(runs["stats"]["residency"]["peak_device_bytes"].values()) <= BUDGET < runs["peak"] / 2
    assert runs["stats"]["residency"]["fetched"]["bytes"] > BUDGET
    assert runs["managed"]["losses_hex"] == runs["plain"]["losses_hex"]
    assert runs["managed"]["trained_sha256"] == runs["plain"]["trained_sha256"]


def test_resuming_from_a_checkpoint_gives_the_same_losses(runs: dict[str, Any]) -> None:
    resumed, whole = runs["resumed"], runs["managed"]
    assert list(resumed["losses_hex"]) == ["3", "4"]
    assert resumed["losses_hex"].items() <= whole["losses_hex"].items()
    assert resumed["trained_sha256"] == whole["trained_sha256"]


def test_a_checkpoint_has_the_adapter_alone(runs: dict[str, Any]) -> None:
    size = (runs["folder"] / "managed" / "checkpoint-2" / "adapter_model.safetensors").stat().st_size
    assert 0 < size < 1 << 20  # the model is 16 MiB
