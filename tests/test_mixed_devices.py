"""Operators with tensors on several devices, and operators that no device implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm  # noqa: F401  (registers the device)

TWO_DEVICES = {"TORCH_UVM_CONF": "emulated_devices:2,emulated_memory:64MiB"}


class TestMixedDevices:
    SAME = "Expected all tensors to be on the same device, but found at least two devices, emu:0 and cpu"

    @pytest.mark.parametrize(
        "call",
        [
            lambda here, there: there + here,
            lambda here, there: here + there,
            lambda here, there: here.add_(there),
            lambda here, there: there.add_(here),
            lambda here, there: here @ there,
            lambda here, there: torch.nn.functional.linear(there, here),
            lambda here, there: torch.addmm(there, here, there),
            lambda here, there: torch.where(here > 0, there, there),
            lambda here, there: there.gather(0, here.long()),
            lambda here, there: there.index_select(0, here[0].long()),
            lambda here, there: torch.nn.functional.embedding(here.long(), there),
            lambda here, there: torch.nn.functional.mse_loss(there, here),
            lambda here, there: torch.cat([there, here]),
            lambda here, there: torch.cat([here, there]),
            lambda here, there: torch.stack([here, there]),
            lambda here, there: torch.stack([there[0, 0], here[0, 0]]),
            lambda here, there: torch._foreach_add([there], [here]),
            lambda here, there: torch.add(there, there, out=here),
            lambda here, there: torch.add(here, here, out=there),
            lambda here, there: torch.mm(here, here, out=there),
            lambda here, there: torch.cat([there, there], out=torch.empty(0)),
            lambda here, there: there.index_select(0, torch.tensor(0)),  # an index does not count as a number
            lambda here, there: there.take(torch.tensor(0)),
            lambda here, there: here + there[0, 0],  # a number may come from the CPU, not from the device
            lambda here, there: here[there.long()],
            lambda here, there: there.index_put_((torch.tensor([0]),), here[0]),
            lambda here, there: torch.sum(
                there, 0, out=torch.empty(())
            ),  # an operand that the operator writes does not count as a number
        ],
    )
    def test_raise(self, call: Callable[[Any, Any], Any]) -> None:
        here, there = torch.ones(2, 2), torch.ones(2, 2, device="emu")
        with pytest.raises(RuntimeError, match=self.SAME):
            call(here, there)
        assert here.eq(1).all() and here.shape == (2, 2)
        assert there.eq(1).all() and there.shape == (2, 2)

    def test_numbers_of_the_cpu_are_accepted(self) -> None:
        x = torch.tensor([1.0, 2.0], device="emu")
        for result in (x * torch.tensor(3.0), torch.tensor(3.0) * x, torch.tensor(3.0, device="emu") * x):
            assert result.is_cuda is False and result.device.type == "emu"
            assert result.tolist() == [3, 6]
        assert torch.where(x > 1, x, torch.tensor(0.0)).tolist() == [0, 2]
        assert x.clone().fill_(torch.tensor(7.0)).tolist() == [7, 7]
        assert x.clone().masked_fill_(x > 1, torch.tensor(-1.0)).tolist() == [1, -1]

    def test_indices_of_the_cpu_are_accepted(self) -> None:
        x = torch.arange(6.0, device="emu").view(3, 2)
        assert x[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]
        assert x[torch.tensor([True, False, True])].tolist() == [[0, 1], [4, 5]]
        x[torch.tensor([1])] = 9
        x[torch.tensor([0]), torch.tensor([1])] = torch.tensor(8.0)
        assert x.tolist() == [[0, 8], [9, 9], [4, 5]]

    def test_two_emulated_devices(self, spawn: Spawn) -> None:
        """Operators refuse tensors of two devices, numbers included. Copies accept them."""
        spawn(
            """
            import torch, torch_uvm, unittest
            a, b = torch.arange(6.0, device="emu:0").view(2, 3), torch.ones(2, 3, device="emu:1")
            calls = [
                lambda: a + b, lambda: b + a, lambda: a.add_(b), lambda: torch.cat([a, b]),
                lambda: torch.stack([b, a]), lambda: torch.add(a, a, out=b), lambda: a @ b.t(),
                lambda: a[b.long()], lambda: b[a[0].long()], lambda: torch._foreach_mul([a], [b]),
                lambda: a * b[0, 0], lambda: a.fill_(b[0, 0]),
            ]
            for number, call in enumerate(calls):
                with unittest.TestCase().assertRaisesRegex(RuntimeError, "same device", msg=number) as caught:
                    call()
                said = str(caught.exception)
                assert "emu:0" in said and "emu:1" in said, (number, said)
            assert a.flatten().tolist() == list(range(6)) and b.eq(1).all()

            for current in (0, 1):
                torch.accelerator.set_device_index(current)
                moved = a.to("emu:1")
                assert moved.device == b.device and moved.tolist() == a.tolist()
                assert moved.data_ptr() != a.data_ptr()
                assert moved.to("emu:0").tolist() == a.tolist()
                assert a.t().to("emu:1").stride() == a.t().stride(), "the format is preserved"
                assert a[:, ::2].to("emu:1").tolist() == a[:, ::2].tolist()
                assert a.to("emu:1", torch.int64).tolist() == a.tolist()
                other = torch.zeros(3, 2, dtype=torch.float64, device="emu:1")
                assert other.t().copy_(a[0]).tolist() == [[0, 1, 2], [0, 1, 2]]
                grown = torch.zeros(2, device="emu:1").resize_(1000)
                assert grown.device.index == 1 and grown[:2].eq(0).all()
                assert torch.empty(0, device="emu:1").set_().device.index == 1
                assert (b + 1).data_ptr() and (b + 1).device.index == 1
            x = a.clone().requires_grad_()
            (x.to("emu:1") * 2).sum().backward()
            assert x.grad.device == x.device and x.grad.eq(2).all()
            """,
            env=TWO_DEVICES,
        )


class TestUnsupported:
    @pytest.mark.parametrize(
        "call",
        [
            lambda x: x.to_sparse_csr(),
            lambda x: torch.eye(2).to_sparse_csr().to("emu").to_dense(),
            lambda x: torch.empty(2, 2, layout=torch.sparse_csr, device="emu"),
            lambda x: torch.eye(2).to_sparse_csr().to("emu") @ x,
            lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to("emu"),
        ],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_raises_not_implemented(self, call: Callable[[torch.Tensor], Any]) -> None:
        with pytest.raises(NotImplementedError) as raised:
            call(torch.eye(2, device="emu"))
        assert len(str(raised.value).partition("\nException raised from")[0]) < 300
