"""Checkpoints written by libraries, of a model that trains in less device memory than it needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import torch_uvm

MIB = 1024**2
WIDTH, LAYERS = 512, 6  # a layer is 1 MiB


@pytest.fixture(autouse=True, params=["in_place", "deferred"])
def under_a_budget(request: pytest.FixtureRequest) -> Iterator[None]:
    torch_uvm.enable(budget=8 * MIB, optimizer=request.param)  # 24 MiB with gradients and moments
    torch.manual_seed(0)
    yield
    torch_uvm.disable()
    gc.collect()
    torch_uvm.set_budget(None)
    torch_uvm.memory.empty_cache()


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to("emu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def steps(self, count: int) -> Training:
        for number in range(count):
            self.optimizer.zero_grad()
            self.model(torch.full((4, WIDTH), 1.0 + number, device="emu")).square().mean().backward()
            self.optimizer.step()
        return self

    def contents(self) -> dict[str, torch.Tensor]:
        found = {name: value.cpu() for name, value in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value.cpu() for name, value in state.items()}
        return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_resume_exactly(tmp_path: Path) -> None:
    training = Training().steps(3)

    def state(of: Training) -> dict[str, Any]:
        model, optimizer = get_state_dict(of.model, of.optimizer)
        return {"model": model, "optimizer": optimizer}

    save(state(training), checkpoint_id=tmp_path / "saved", no_dist=True)
    saved = training.contents()
    training.steps(2)

    resumed = Training()
    loaded = state(resumed)
    load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state_dict(
        resumed.model,
        resumed.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    assert_equal(resumed.contents(), saved)
    assert_equal(resumed.steps(2).contents(), training.contents())
    assert all(torch_uvm.is_managed(each) for each in resumed.model.parameters())


def test_safetensors_have_the_latest_bytes(tmp_path: Path) -> None:
    training = Training().steps(3)
    save_file(training.model.state_dict(), tmp_path / "weights.safetensors")
    assert_equal(
        load_file(tmp_path / "weights.safetensors"),
        {name: value.cpu() for name, value in training.model.state_dict().items()},
    )


def test_safetensors_are_loaded_into_a_model_on_the_device(tmp_path: Path) -> None:
    training = Training().steps(3)
    save_model(training.model, str(tmp_path / "model.safetensors"))
    fresh = Training()
    missing, unexpected = load_model(fresh.model, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    assert {each.device.type for each in fresh.model.parameters()} == {"emu"}
    x = torch.ones(4, WIDTH, device="emu")
    assert torch.equal(fresh.model(x), training.model(x))


def test_safetensors_of_a_cpu_label(tmp_path: Path) -> None:
    """The CPU label shares the bytes, and safetensors reads them by address."""
    x = torch.arange(WIDTH * WIDTH, dtype=torch.float32, device="emu").view(WIDTH, WIDTH)
    label = torch_uvm.to(x, "cpu")
    save_file({"x": label}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], x.cpu())


def test_safetensors_does_not_load_to_the_device(tmp_path: Path) -> None:
    """safetensors has its own list of devices. Tensors are loaded to the CPU and moved."""
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(SafetensorError, match="emu"):
        load_file(tmp_path / "x.safetensors", device="emu")
