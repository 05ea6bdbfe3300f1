"""Operators whose implementation PyTorch chooses by device behave on the emulated accelerator as on the
CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from _tables import same_bits
from torch import nn
from torch.nn import functional as F


class TestGroupNorm:
    @pytest.mark.parametrize("shape", [(2, 6, 4, 5), (2, 6, 3, 4, 5)], ids=["images", "volumes"])
    def test_keeps_channels_last(self, shape: tuple[int, ...]) -> None:
        memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        results = []
        for device in ("cpu", "emu"):
            torch.manual_seed(0)
            x = torch.randn(shape).to(memory_format=memory_format).to(device).requires_grad_()
            norm = nn.GroupNorm(3, 6).to(device)
            y = norm(x)
            assert y.is_contiguous(memory_format=memory_format)
            (y * torch.randn(shape).to(device)).sum().backward()
            assert x.grad is not None
            results.append((y, x.grad))
        assert same_bits(results[0][0], results[1][0])
        # PyTorch's backward makes its operands contiguous on any device but the CPU.
        torch.testing.assert_close(results[1][1].cpu(), results[0][1])

    def test_of_no_bytes_and_in_inference_mode(self) -> None:
        norm = nn.GroupNorm(3, 6).to("emu")
        assert norm(torch.ones(0, 6, 4, device="emu")).shape == (0, 6, 4)
        with torch.inference_mode():
            x = torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last)
            assert same_bits(copy.deepcopy(norm).cpu()(x), norm(x.to("emu")))

    def test_bad_input(self) -> None:
        with pytest.raises(RuntimeError, match=r"divisible by num_groups, .* \[2, 6, 4\] and num_groups=4"):
            F.group_norm(torch.ones(2, 6, 4, device="emu"), 4)
        with pytest.raises(RuntimeError, match="weight to be a vector of size equal to the number of"):
            F.group_norm(torch.ones(2, 6, 4, device="emu"), 3, torch.ones(5, device="emu"))


class TestAttention:
    def test_first_derivatives_equal_the_cpus(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(2, 2, 5, 8)
        gradients = []
        for device in ("cpu", "emu"):
            operand = x.detach().to(device, copy=True).requires_grad_()
            F.scaled_dot_product_attention(operand, operand, operand).square().sum().backward()
            gradients.append(operand.grad)
        assert gradients[0] is not None and gradients[1] is not None
        assert same_bits(gradients[0], gradients[1])
