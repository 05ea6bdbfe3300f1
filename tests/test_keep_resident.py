"""`keep_resident`: pinned tensors stay on the device; scopes nest, decorate and end; bad input is refused."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from _pressure import (
    MIB,
    is_on_device,
    leaves,
    press,
    small_hard_budget,  # noqa: F401  (the fixture `budget`)
)
from _threads import in_threads

import torch_uvm


class TestKeeping:
    def test_unpinned_tensors_are_evicted(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        assert leaves(x)
        assert torch_uvm.stats()["written_back"]["count"] > 0
        assert (x == 3.0).all().item()

    def test_kept_tensors_stay_where_they_are(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        press()
        kept = torch_uvm.keep_resident(x)
        assert is_on_device(x)
        address = x.data_ptr()
        press()
        assert x.data_ptr() == address and is_on_device(x)
        kept.release()
        assert leaves(x)
        kept.release()  # a second release does nothing
        assert (x == 3.0).all().item()

    def test_holds_nest(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        first, second = torch_uvm.keep_resident(x), torch_uvm.keep_resident([x, {"a": x.view(-1, 2)[3:]}])
        with torch_uvm.resident(x):
            first.release()
            press()
            assert is_on_device(x)
        press()
        assert is_on_device(x)
        second.release()
        assert leaves(x)

    def test_takes_modules_and_optimizers(self, budget: int) -> None:
        model = torch.nn.Linear(512, 1024).to("emu")  # 2 MiB
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(2, 512, device="emu")).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]["momentum_buffer"]
        with torch_uvm.resident((model, [optimizer])):
            press()
            assert is_on_device(model.weight) and is_on_device(state)
        assert leaves(model.weight) and leaves(state)

    def test_a_scope_ends_with_an_exception_and_can_be_entered_again(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        scope = torch_uvm.resident(x)
        for _ in range(2):
            with pytest.raises(KeyError), scope, scope:
                raise KeyError
            assert leaves(x)
        with pytest.raises(RuntimeError, match="not open"):
            scope.__exit__(None, None, None)

    def test_decorates(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")

        @torch_uvm.resident(x)
        def body() -> bool:
            press()
            return is_on_device(x)

        assert body() and body()

    def test_a_scope_of_several_threads(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        scope = torch_uvm.resident(x)
        inside = threading.Barrier(4)

        def enter() -> None:
            for _ in range(50):
                with scope:
                    pass
            inside.wait()
            with scope:
                address = x.data_ptr()
                for _ in range(20):
                    x.sum()
                    assert x.data_ptr() == address

        in_threads(*[enter] * 4)
        assert leaves(x)

    def test_dropped_handles_pin_until_the_tensor_is_freed(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        torch_uvm.keep_resident(x)
        gc.collect()
        press()
        assert is_on_device(x)
        torch_uvm.keep_resident([torch.ones(MIB // 2, device="emu") for _ in range(2)])
        # 4 MiB plus small tensors: fits only if the two were freed.
        torch.ones(2, MIB // 2, device="emu").sum()

    @pytest.mark.parametrize("keep", [torch_uvm.keep_resident, torch_uvm.resident])
    def test_bad_input(self, keep: Any) -> None:
        with pytest.raises(TypeError, match=r"x\[1\]\['a'\] is 3 \(int\)"):
            keep([torch.ones(2), {"a": 3}])
        with pytest.raises(ValueError, match="not managed"):
            keep(torch.ones(2))
        keep([torch.ones(2)])  # an empty set of managed tensors is no error

    def test_without_a_budget(self) -> None:
        torch_uvm.set_budget(None)
        x = torch_uvm.memory.ones(4)
        with torch_uvm.resident(x):
            torch_uvm.keep_resident(x).release()
        torch_uvm.step()
