"""The test option that evicts every storage after each operator."""

from __future__ import annotations

import pytest
import torch
from _pressure import (
    is_on_device_of,
    press,
    small_hard_budget,  # noqa: F401  (the fixture `budget`)
)

import torch_uvm


class TestEvictingAfterOperators:
    """The tests over whole tables of operators rely on this option."""

    @pytest.mark.usefixtures("evicting")
    def test_every_storage_is_evicted(self) -> None:
        x = torch.ones(3, device="emu")
        y = x + 1
        for tensor in (x, y):
            assert torch_uvm.residency(tensor) == {torch.device("cpu"): 12}
        kept = torch_uvm.keep_resident(x)
        address = x.data_ptr()
        y.add_(x)
        assert x.data_ptr() == address and is_on_device_of(x, 12)
        kept.release()
        assert y.tolist() == [3, 3, 3]

    def test_small_tensors_stay_without_it(self, budget: int) -> None:
        x = torch.ones(3, device="emu")
        press()
        assert is_on_device_of(x, 12)
