"""Moves, copies and resizes of managed CPU tensors."""

from __future__ import annotations

import pytest
import torch
from _host_tensors import (
    DEVICE,
    MIB,
    PRELUDE,
    host_bytes,
    host_tensors_on,  # noqa: F401  (every test has it)
)
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C


class TestResize:
    def test_grows_into_managed_memory(self) -> None:
        x = torch.arange(MIB)
        x.resize_(2 * MIB)
        assert torch_uvm.is_managed(x) and torch.equal(x[:MIB], torch.arange(MIB))
        del x
        assert host_bytes() == 0

    def test_a_small_tensor_grows_into_it(self) -> None:
        x = torch.arange(10)
        x.resize_(MIB)
        assert torch_uvm.is_managed(x) and x[:10].tolist() == list(range(10))

    def test_while_off_it_grows_into_ordinary_memory(self) -> None:
        x = torch.arange(MIB)
        with torch_uvm.disabled():
            x.resize_(2 * MIB)
        assert not torch_uvm.is_managed(x) and torch.equal(x[:MIB], torch.arange(MIB))

    def test_not_while_it_has_two_labels(self) -> None:
        x = torch.arange(MIB)
        y = torch_uvm.to(x, DEVICE)
        with pytest.raises(RuntimeError):
            x.resize_(2 * MIB)
        assert y[-1].item() == MIB - 1


class TestMoves:
    def test_to_the_device_and_back(self) -> None:
        x = torch.arange(MIB)
        y = torch_uvm.to(x, DEVICE)
        assert y.device.type == DEVICE and y.data_ptr() == x.data_ptr() and torch_uvm.is_managed(y)
        y += 1
        z = torch_uvm.to(y, "cpu")
        assert z.data_ptr() == x.data_ptr() and torch.equal(x, torch.arange(1, MIB + 1))
        assert torch_uvm.is_managed(x) and torch_uvm.is_managed(z)
        base = x.untyped_storage()._cdata
        assert z.untyped_storage()._cdata == base, "a round trip returns the first storage"

    def test_any_label_keeps_the_bytes(self) -> None:
        before = torch_uvm.memory.memory_allocated()
        x = torch.arange(MIB)
        y = torch_uvm.to(x, DEVICE)
        del x
        assert y.sum().item() == MIB * (MIB - 1) // 2
        del y
        assert torch_uvm.memory.memory_allocated() == before
        assert _C.check_allocator() is None

    def test_module(self) -> None:
        layer = nn.Linear(1024, 1024)
        address = layer.weight.data_ptr()
        torch_uvm.to(layer, DEVICE)
        assert layer.weight.device.type == DEVICE and layer.weight.data_ptr() == address
        assert layer(torch.ones(2, 1024, device=DEVICE)).shape == (2, 1024)

    def test_views_keep_offset_and_strides(self) -> None:
        x = torch.arange(4 * MIB).view(1024, 4096).t()[3:, 5:]
        y = torch_uvm.to(x, DEVICE)
        assert y.stride() == x.stride() and y.data_ptr() == x.data_ptr() and torch.equal(y.cpu(), x)

    def test_plain_copies_both_ways(self) -> None:
        x = torch.arange(MIB)
        y = x.to(DEVICE)
        assert y.data_ptr() != x.data_ptr() and torch.equal(y.cpu(), x)
        y += 1
        x.copy_(y)
        assert x[-1] == MIB
        z = torch.empty_like(x)
        z.copy_(y, non_blocking=True)
        torch.accelerator.synchronize()
        assert torch.equal(z, x)

    def test_memory_freed_while_a_copy_reads_it_is_not_reused_too_early(self, spawn: Spawn) -> None:
        """The copy is delayed. The host tensor is freed, and other tensors are allocated, before the copy is
        done."""
        spawn(
            PRELUDE
            + """
for value in range(20):
    x = torch.full((1 << 18,), float(value))
    y = x.to("emu", non_blocking=True)
    del x
    others = [torch.full((1 << 18,), -1.0) for _ in range(4)]
    assert y.sum().item() == value * (1 << 18), value
""",
            env={"TORCH_UVM_CONF": "emulated_schedule_seed:2"},
        )
