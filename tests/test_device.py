"""The emulated accelerator as a PyTorch device: its functions, indices, and exit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _counters import counted
from _spawn import Spawn

from torch_uvm import _C

emu: Any = torch.get_device_module("emu")
MIB = 1024**2
TWO_DEVICES = {"TORCH_UVM_CONF": "emulated_devices:2,emulated_memory:64MiB"}


class TestAccelerator:
    def test_is_current(self) -> None:
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("emu")
        assert torch.accelerator.device_count() == 1
        assert torch.accelerator.current_device_index() == 0
        assert torch._C._get_privateuse1_backend_name() == "emu"

    def test_current_stream_is_of_the_device(self) -> None:
        stream = torch.accelerator.current_stream()
        assert stream.device == torch.device("emu", 0)
        assert stream == torch.accelerator.current_stream("emu:0")

    def test_synchronize_waits_and_is_counted(self) -> None:
        host = torch.ones(MIB).pin_memory()
        there = torch.zeros(MIB, device="emu")
        there.copy_(host, non_blocking=True)
        assert counted(torch.accelerator.synchronize) == {"synchronisations": 1}
        assert _C.emu_pending_operations() == 0

    def test_memory_functions_see_the_device(self) -> None:
        before = torch.accelerator.memory_allocated()
        x = torch.empty(3 * MIB, dtype=torch.uint8, device="emu")
        assert torch.accelerator.memory_allocated() - before == 3 * MIB
        assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
        del x
        assert torch.accelerator.memory_allocated() == before

    def test_memory_info_is_free_and_total(self) -> None:
        free, total = torch.accelerator.get_memory_info()
        assert total == 256 * MIB and 0 < free <= total
        assert torch.accelerator.get_memory_info() == emu.mem_get_info()

    def test_several_devices(self, spawn: Spawn) -> None:
        """Current devices, contexts, streams and memory by device; a device per thread."""
        spawn(
            """
            import threading, torch, torch_uvm, unittest
            emu = torch.get_device_module("emu")
            acc = torch.accelerator
            assert acc.device_count() == emu.device_count() == 2
            acc.set_device_index(1)
            assert acc.current_device_index() == emu.current_device() == 1
            assert torch.empty(1, device="emu").device == torch.device("emu:1")
            assert acc.current_stream().device == torch.device("emu:1")
            seen = []
            thread = threading.Thread(target=lambda: seen.append(acc.current_device_index()))
            thread.start(); thread.join()
            assert seen == [0], "a thread begins on device 0"
            with acc.device_index(0):
                assert torch.ones(1, device="emu").device.index == 0
                with emu.device("emu:1"):
                    assert torch.ones(1, device="emu").device.index == 1
                with emu.device_of(torch.ones(1, device="emu:1")):
                    assert emu.current_device() == 1
                with emu.device(None), emu.device_of(torch.ones(1)):
                    assert emu.current_device() == 0
                assert emu.current_device() == 0
            assert emu.current_device() == 1
            try:
                with emu.device(0):
                    raise KeyError
            except KeyError:
                assert emu.current_device() == 1
            emu.set_device("emu:0")
            x = torch.ones(1 << 20, dtype=torch.uint8, device="emu:1")
            assert emu.memory_allocated(1) == 1 << 20 and emu.memory_allocated(0) == 0
            assert (x + x).device == (x.clone()).device == torch.zeros_like(x).device == x.device
            assert x.get_device() == 1 and emu.current_device() == 0
            acc.synchronize(1)
            with unittest.TestCase().assertRaisesRegex(ValueError, "index 2") as caught:
                torch.empty(1, device="emu:2")
            assert "there are 2 (0 to 1)" in str(caught.exception), caught.exception
            """,
            env=TWO_DEVICES,
        )


class TestModule:
    def test_is_there_and_available(self) -> None:
        assert emu.is_available()
        assert emu.device_count() == 1 and emu.current_device() == 0
        torch.empty(1, device="emu")
        assert emu.is_initialized()

    def test_device_is_a_context(self) -> None:
        with emu.device("emu:0"), emu.device(0), emu.device(torch.device("emu")):
            assert emu.current_device() == 0

    def test_takes_no_other_devices(self) -> None:
        with pytest.raises(ValueError, match="device cpu; expected one of type 'emu'"):
            emu.memory_allocated("cpu")

    def test_properties(self) -> None:
        properties = emu.get_device_properties(0)
        assert properties["total_memory"] == 256 * MIB
        assert emu.get_device_name() == properties["name"] != ""
        assert emu.is_bf16_supported() and torch.float16 in emu.get_amp_supported_dtype()


def test_names_of_types() -> None:
    x = torch.ones(3, device="emu")
    assert x.type() == "torch.emu.FloatTensor"
    y = x.type("torch.emu.LongTensor")
    assert y.dtype is torch.int64 and y.device == x.device and y.tolist() == [1, 1, 1]


class TestUnknownIndex:
    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.empty(1, device="emu:7"),
            lambda: torch.ones(1).to("emu:7"),
            lambda: torch.ones(1, device="emu").to("emu:7"),
            lambda: torch.empty_strided((1,), (1,), device="emu:7"),
            lambda: torch.rand(1, device="emu:7"),
            lambda: torch.tensor([1], device="emu:7"),
            lambda: torch.accelerator.set_device_index(7),
            lambda: torch.accelerator.synchronize(7),
            lambda: torch.accelerator.memory_stats(7),
            lambda: torch.accelerator.current_stream(7),
            lambda: torch.Stream("emu:7"),
            lambda: torch.Generator("emu:7"),
            lambda: emu.device(7),
            lambda: emu.Stream(7),
            lambda: emu.memory_allocated("emu:7"),
            lambda: emu.manual_seed(1) or emu.get_rng_state(7),
        ],
    )
    def test_names_index_and_count(self, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=r"emu device index 7; there are 1 \(0 to 0\)"):
            call()
        assert torch.accelerator.current_device_index() == 0

    def test_negative(self) -> None:
        with pytest.raises(RuntimeError, match="must not be negative"):
            torch.empty(1, device=torch.device("emu", -2))


class TestExit:
    def test_waits_for_the_threads_of_backward(self, spawn: Spawn) -> None:
        """The threads release a pass and its Python context after backward() returns. During interpreter
        shutdown that would abort the process. The long switch interval keeps the threads from the GIL until
        then."""
        spawn(
            """
            import atexit, contextvars, gc, os, sys

            def contexts():
                return sum(type(o) is contextvars.Context for o in gc.get_objects())

            @atexit.register  # registered before torch_uvm's own handler, so called after it
            def check():
                if contexts() != before:
                    os._exit(9)

            import torch, torch_uvm
            contextvars.copy_context()  # creates the thread's own context
            before = contexts()
            sys.setswitchinterval(100)
            x = torch.ones(3, device="emu", requires_grad=True)
            for _ in range(30):
                x.square().sum().backward()
                torch_uvm._C.emu_finish_backward_threads()
                assert contexts() == before
            x.square().sum().backward()
            """
        )
