"""`managed_copy`, the functional form of a move."""

# Wrong arguments are the point of some tests; torch has no stub for `managed=`.
# mypy: disable-error-code="call-overload, no-any-return"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _managed_tensors import CPU, managed, managed_copy, to_copy
from torch.library import opcheck

import torch_uvm


class TestManagedCopy:
    """The functional form."""

    SAMPLES = (
        (lambda: torch.randn(3, 4), "emu", torch.float32),
        (lambda: torch.randn(3, 4).t(), "emu", torch.float64),
        (lambda: managed(3, 4), "cpu", torch.float32),
        (lambda: managed(3, 4)[1:, ::2], "cpu", torch.bfloat16),
        (lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "emu", torch.float32),
        (lambda: torch.randn(3, 4, requires_grad=True), "emu", torch.float32),
        (lambda: torch.randn(3, dtype=torch.complex64, requires_grad=True), "cpu", torch.complex128),
        (lambda: torch.arange(5), "cpu", torch.int32),
        (lambda: torch.randn(2, 1).expand(2, 3), "emu", torch.float32),
        (lambda: torch.randn(0, 3), "emu", torch.float32),
        (lambda: torch.tensor(3.0), "emu", torch.float32),
        (lambda: torch.tensor([True, False]), "emu", torch.bool),
    )

    @pytest.mark.parametrize(("make", "device", "dtype"), SAMPLES)
    @pytest.mark.parametrize("form", [torch.preserve_format, torch.contiguous_format], ids=str)
    def test_opcheck(
        self, make: Callable[[], torch.Tensor], device: str, dtype: torch.dtype, form: torch.memory_format
    ) -> None:
        for non_blocking in (False, True):
            opcheck(managed_copy.default, (make(), torch.device(device), dtype, non_blocking, form))

    @pytest.mark.parametrize(("make", "device", "dtype"), SAMPLES)
    def test_equals_to(self, make: Callable[[], torch.Tensor], device: str, dtype: torch.dtype) -> None:
        x = make()
        y, of_torch = to_copy(x, device, dtype), x.to(device, dtype, copy=True)
        assert torch_uvm.is_managed(y) or x.numel() == 0
        assert (y.device, y.dtype, y.stride()) == (of_torch.device, dtype, of_torch.stride())
        assert torch.equal(y.cpu(), of_torch.cpu())
        assert y.requires_grad == x.requires_grad

    @pytest.mark.parametrize(("source", "target"), [("cpu", "emu"), ("emu", "cpu"), ("emu", "emu")])
    def test_gradients(self, source: str, target: str) -> None:
        x = torch.rand(3, dtype=torch.float64).to(source).requires_grad_()

        def function(x: torch.Tensor) -> torch.Tensor:
            return to_copy(x, target).sin()

        assert torch.autograd.gradcheck(function, (x,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, (x,))

    def test_gradient_has_the_dtype_of_the_input(self) -> None:
        x = torch.ones(3, requires_grad=True)
        to_copy(x, "emu", torch.complex64).abs().sum().backward()
        assert x.grad is not None and (x.grad.dtype, x.grad.device) == (torch.float32, CPU)
        assert not to_copy(x, "emu", torch.int32).requires_grad

    @pytest.mark.parametrize(
        ("make", "device", "dtype", "message"),
        [
            (lambda: torch.eye(3).to_sparse_csr(), "cpu", torch.float32, "strided|SparseCsr"),
            (lambda: torch.ones(3), "meta", torch.float32, "meta"),
            (lambda: torch.ones(3), "emu:7", torch.float32, "emu:7"),
            (lambda: torch.ones(3), "cpu", torch.qint8, "qint8|QInt8"),
        ],
    )
    def test_bad_input(
        self, make: Callable[[], torch.Tensor], device: str, dtype: torch.dtype, message: str
    ) -> None:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            managed_copy(make(), torch.device(device), dtype, False, torch.preserve_format)
