"""Kernels of the emulated accelerator: copies, views, page faults and modelled time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _counters import counted

import torch_uvm
from torch_uvm import _C, emulated

MIB = 1024**2


class TestKernels:
    def test_work_on_the_device_and_copy_nothing(self) -> None:
        a, b = torch.rand(256, 256, device="emu"), torch.rand(256, 256, device="emu")
        counts = counted(lambda: a @ b)
        assert counts["kernels"] == 1
        assert not {"copy_calls", "bytes_copied_to_device", "bytes_copied_to_host"} & set(counts)

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.view(-1),
            lambda x: x.t(),
            lambda x: x[1:, ::2],
            lambda x: x.expand(3, 4, 4),
            lambda x: x.unsqueeze(0).squeeze(0),
            lambda x: x.as_strided((2,), (5,)),
            lambda x: x.diagonal(),
            lambda x: x.chunk(2)[1],
            lambda x: x.detach(),
            lambda x: x.view(torch.int32),
        ],
    )
    def test_views_are_none_and_share_the_storage(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x, here = torch.zeros(4, 4, device="emu"), torch.zeros(4, 4)
        seen: list[torch.Tensor] = []
        assert counted(lambda: seen.append(view(x))) == {}
        expected = view(here)
        assert seen[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert seen[0].data_ptr() - x.data_ptr() == expected.data_ptr() - here.data_ptr()
        assert (seen[0].shape, seen[0].stride()) == (expected.shape, expected.stride())

    def test_first_touch_faults_each_page_once(self) -> None:
        try:
            _C.set_option("populate", "false")
            torch_uvm.memory.empty_cache()
            with torch_uvm.enabled():
                x = torch.empty(4 * MIB, dtype=torch.uint8, device="emu")
        finally:
            _C.set_option("populate", "true")
        assert emulated.residency(x) == {}
        assert counted(lambda: x.fill_(1))["faults_on_device"] == 64
        assert emulated.residency(x) == {torch.device("emu", 0): 4 * MIB}
        assert "faults_on_device" not in counted(lambda: x.fill_(2)), (
            "the pages are resident after the first touch"
        )

    def test_operands_are_brought_to_the_device(self) -> None:
        torch_uvm.set_budget(None)  # page faults, as with the driver
        with torch_uvm.enabled():
            big = [torch.ones(32 * MIB, device="emu") for _ in range(3)]  # 384 MiB on 256
        counts = counted(lambda: big[0].sum())
        assert counts["kernels"] == 1
        assert counts["bytes_to_device"] > 0 and counts["faults_on_device"] > 0
        assert counts["evicted_pages"] > 0
        assert emulated.residency(big[0]) == {torch.device("emu", 0): 128 * MIB}

    def test_only_bytes_of_a_view_are_touched(self) -> None:
        torch_uvm.set_budget(None)  # migration of whole pages
        with torch_uvm.enabled():
            x = torch.ones(32 * MIB, device="emu")
            others = [torch.ones(32 * MIB, device="emu") for _ in range(2)]
        assert torch.device("emu", 0) not in emulated.residency(x), "evicted by the others"
        assert counted(lambda: x[: 16 * 1024].add_(1))["faults_on_device"] == 1
        assert emulated.residency(x)[torch.device("emu", 0)] == 64 * 1024
        del others

    def test_a_kernel_takes_modelled_time(self) -> None:
        x = torch.ones(MIB, device="emu")
        before = emulated.time_us()
        for _ in range(10):
            x.add_(1)
        assert emulated.time_us() > before
