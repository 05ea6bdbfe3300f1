"""An export pins its storage, independent of the budget at the time of the export."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _spawn import Spawn
from torch.utils.dlpack import DLDeviceType

import torch_uvm
from torch_uvm import _C

MIB = 1 << 20
MANAGED = DLDeviceType.kDLCUDAManaged
DEVICE = torch.device("emu:0")
EMU = {"TORCH_UVM_DEVICE": "emu"}


@pytest.fixture(autouse=True)
def budget() -> Iterator[None]:
    if _C.backend() != "emulated":
        pytest.skip("sizes are the emulated accelerator's")
    torch_uvm.enable(budget="64MiB")
    torch_uvm.set_budget(None)
    yield
    torch_uvm.disable()


def pressure() -> None:
    """Uses more than any budget of this file, so that every movable storage is evicted."""
    kept = [torch.zeros(MIB, device=DEVICE) for _ in range(8)]
    for _ in range(2):
        for each in kept:
            each.add_(1)


def test_an_export_from_before_the_budget_stays_until_it_is_released() -> None:
    x = torch.ones(MIB, device=DEVICE)
    capsule = x.__dlpack__(dl_device=(MANAGED, 0))
    address = x.data_ptr()
    torch_uvm.set_budget("16MiB")
    pressure()
    assert x.data_ptr() == address
    del capsule
    pressure()
    assert x.data_ptr() != address
    assert x.sum().item() == MIB


def test_an_export_of_a_labelled_tensor_stays_when_the_label_is_gone() -> None:
    torch_uvm.set_budget("16MiB")
    x = torch.ones(MIB, device=DEVICE)
    label = torch_uvm.to(x, "cpu")
    capsule = x.__dlpack__(dl_device=(MANAGED, 0))
    address = x.data_ptr()
    del label
    pressure()
    assert x.data_ptr() == address
    del capsule
    pressure()
    assert x.data_ptr() != address


def test_the_end_of_an_export_keeps_other_pins() -> None:
    x = torch.ones(MIB, device=DEVICE)
    capsule = x.__dlpack__(dl_device=(MANAGED, 0))
    address = x.data_ptr()
    torch_uvm.set_budget("16MiB")
    kept = torch_uvm.keep_resident(x)
    del capsule
    pressure()
    assert x.data_ptr() == address
    kept.release()
    pressure()
    assert x.data_ptr() != address


def test_an_export_from_before_any_budget(spawn: Spawn) -> None:
    spawn(
        """
        import torch, torch_uvm
        torch_uvm.enable(budget=None)
        x = torch.ones(1 << 20, device="emu")
        address = x.data_ptr()
        capsule = x.__dlpack__(dl_device=(13, 0))
        torch_uvm.set_budget("16MiB")
        kept = [torch.zeros(1 << 20, device="emu") for _ in range(8)]
        for each in kept:
            x.add_(0)
            each.add_(1)
        assert x.data_ptr() == address
        """,
        env=EMU,
    )
