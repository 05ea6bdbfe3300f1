"""The budget, checked by the driver's figures: device memory of the process, sampled while steps run."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch
from _cuda import MIB
from _cuda_budget import mlp, run, training

import torch_uvm

pytestmark = pytest.mark.usefixtures("to_the_last_bit")


class Watch:
    """The maximum of this process's device memory. `used` is sampled a thousand times per second."""

    def __init__(self, used: Callable[[], int]) -> None:
        self._used = used
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = 0
        self.samples = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self._used())
            self.samples += 1


def used_on_the_device() -> int:
    free, total = torch.cuda.mem_get_info(0)
    return total - free


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def processes_on_the_device() -> int:
    """Processes on the device, by NVML; 1 if it does not report them. It does not report their managed
    memory."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 1
    handle = ctypes.c_void_p()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    card = int(visible) if visible.isdigit() else 0
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(card, ctypes.byref(handle)):
        return 1
    count, found = ctypes.c_uint(128), (_Process * 128)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found):
        return 1
    return int(count.value)


# The driver allocates device memory for managed allocations in pieces, which allocations share. On an H200
# with driver 580, segments of 98, 130, 258 and 434 MiB took 128, 256, 384 and 512 MiB. The driver caches up
# to one piece of freed memory.
DRIVERS_PIECE = 128 * MIB


def in_pieces(count: int) -> int:
    return -(-count // DRIVERS_PIECE) * DRIVERS_PIECE


class TestDriversFigures:
    def test_the_budget_holds_while_steps_run(self) -> None:
        """Uses the driver's free memory, sampled at 1 kHz. The overhead of PyTorch and the driver (context,
        kernels, workspaces, tables for managed memory) is measured in runs that fit, as their use beyond
        their tensors."""
        torch.cuda.synchronize()
        if processes_on_the_device() > 1:
            pytest.skip("other processes use the device: its free memory does not tell what is ours")
        used = used_on_the_device
        slack = 32 * MIB  # the driver's tables for pinned memory, streams, and kernels that are loaded late
        budget = 240 * MIB  # slightly below two of the driver's pieces: its rounding hides 16 MiB
        program = training(lambda: mlp(2048, 12), self.wide, steps=6, foreach=False)  # 800 MiB

        def clean() -> int:
            gc.collect()
            torch.cuda.synchronize()
            torch_uvm.memory.empty_cache()
            torch.cuda.empty_cache()
            return used()

        torch.manual_seed(0)
        clean()
        expected = [result.cpu() for result in program()]  # loads kernels and allocates workspaces
        start = clean()
        torch.cuda.reset_peak_memory_stats()
        with Watch(used) as plain:
            torch.manual_seed(0)
            program()
        in_core = torch.cuda.max_memory_reserved()
        own = max(plain.peak - start - in_core, 0)
        # Before the run without a budget: the driver caches that run's memory, which would hide new
        # allocations.
        start = clean()
        with Watch(used) as watch:
            bounded = run(program, budget)
        taken = watch.peak - start
        start = clean()
        with Watch(used) as managed:
            reserved = run(program, None).reserved
        taken_without = managed.peak - start
        own = max(own, taken_without - in_pieces(reserved))

        assert watch.samples > 100
        assert all(map(torch.equal, bounded.results, expected))
        assert bounded.figures["over_budget"] == 0 and bounded.figures["written_back"]["bytes"] > 0
        assert bounded.reserved <= budget
        most = in_pieces(budget) + own + slack
        assert taken <= most, (taken, budget, own)
        assert taken > budget // 2, "the sampling missed the run"
        assert min(in_core, taken_without) > 2 * most, "the program nearly fits"

    @staticmethod
    def wide() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(256, 2048), torch.randint(0, 16, (256,))
