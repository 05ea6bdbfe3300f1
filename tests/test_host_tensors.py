"""`torch_uvm.enable(host_tensors=True)`: CPU tensors of at least 1 MiB come from managed memory."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from _host_tensors import (
    DEVICE,
    MIB,
    host_bytes,
    host_tensors_on,  # noqa: F401  (every test has it)
)
from _spawn import Spawn
from torch import nn

import torch_uvm


class TestWhatIsManaged:
    def test_from_a_mebibyte_on(self) -> None:
        assert torch_uvm.is_managed(torch.empty(MIB, dtype=torch.uint8))
        assert not torch_uvm.is_managed(torch.empty(MIB - 1, dtype=torch.uint8))
        assert not torch_uvm.is_managed(torch.empty(0))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(MIB),
            lambda: torch.randn(1024, 1024),
            lambda: torch.arange(MIB),
            lambda: torch.empty(MIB, dtype=torch.complex64),
            lambda: torch.zeros(MIB, dtype=torch.bool),
            lambda: torch.ones(1024, 1024, dtype=torch.bfloat16),
            lambda: torch.ones(1024, 1024) @ torch.ones(1024, 1024),
            lambda: torch.ones(1024, 1024).t().contiguous(),
            lambda: torch.ones(1024, 1024)[::2, ::2],
            lambda: torch.stack([torch.ones(1024) for _ in range(300)]),
            lambda: nn.Linear(1024, 1024).weight,
            lambda: torch.ones(4, MIB, device=DEVICE).cpu(),
            lambda: torch.ones(MIB, requires_grad=True).exp(),
            lambda: torch.ones(MIB).clone(),
        ],
    )
    def test_all_factories_are_covered(self, make: Callable[[], torch.Tensor]) -> None:
        x = make()
        assert x.device.type == "cpu" and torch_uvm.is_managed(x)

    def test_gradients(self) -> None:
        x = torch.ones(MIB, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad is not None and torch_uvm.is_managed(x.grad)
        assert x.grad[0] == 2

    def test_their_home_is_the_host_and_they_are_freed(self) -> None:
        x = torch.empty(4 * MIB, dtype=torch.uint8)
        assert host_bytes() == 4 * MIB
        view = x[10:20]
        del x
        assert host_bytes() == 4 * MIB
        del view
        assert host_bytes() == 0

    def test_off_by_default(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            torch_uvm.enable()
            assert not torch_uvm.is_managed(torch.ones(1 << 20)) and not torch_uvm._C.host_tensors()
            torch_uvm.enable(host_tensors=True)
            assert torch_uvm.is_managed(torch.ones(1 << 20)) and torch_uvm._C.host_tensors()
            torch_uvm.enable()
            assert not torch_uvm.is_managed(torch.ones(1 << 20))
            """
        )

    def test_values_equal_those_in_ordinary_memory(self) -> None:
        torch.manual_seed(5)
        managed = torch.randn(512, 1024).cumsum(0).softmax(1)
        with torch_uvm.disabled():
            torch.manual_seed(5)
            ordinary = torch.randn(512, 1024).cumsum(0).softmax(1)
        assert torch_uvm.is_managed(managed) and not torch_uvm.is_managed(ordinary)
        assert torch.equal(managed, ordinary)


class TestSwitch:
    def test_scopes_and_disable(self) -> None:
        with torch_uvm.disabled():
            assert not torch_uvm.is_managed(torch.ones(MIB))
            with torch_uvm.enabled():
                assert torch_uvm.is_managed(torch.ones(MIB))
        torch_uvm.disable()
        assert not torch_uvm.is_managed(torch.ones(MIB))
        with torch_uvm.enabled():
            assert torch_uvm.is_managed(torch.ones(MIB))

    def test_existing_ones_outlive_disable(self) -> None:
        x = torch.arange(MIB)
        torch_uvm.enable(host_tensors=False)
        assert not torch_uvm.is_managed(torch.ones(MIB))
        torch_uvm.disable()
        assert torch_uvm.is_managed(x)
        x += 1
        assert x[-1] == MIB and not torch_uvm.is_managed(x + 1)
        del x
        assert host_bytes() == 0

    def test_a_scope_applies_to_its_thread(self) -> None:
        seen: list[bool] = []
        with torch_uvm.disabled():
            thread = threading.Thread(target=lambda: seen.append(torch_uvm.is_managed(torch.ones(MIB))))
            thread.start()
            thread.join()
        assert seen == [True]

    def test_without_a_backend_it_is_refused(self, spawn: Spawn) -> None:
        """An accelerator that torch_uvm does not support."""
        spawn(
            """
            import torch, unittest
            torch.accelerator.current_accelerator = lambda check_available=False: torch.device("xpu")
            import torch_uvm
            assert torch_uvm._C.backend() == "none"
            for enable in (lambda on: torch_uvm.enable(host_tensors=on), torch_uvm._C.set_host_tensors):
                with unittest.TestCase().assertRaises(RuntimeError):
                    enable(True)
            torch_uvm._C.set_host_tensors(False)
            assert not torch_uvm._C.host_tensors() and not torch_uvm.is_managed(torch.ones(1 << 20))
            """
        )


class TestWhatStaysWhatItIs:
    def test_memory_of_other_allocators(self, tmp_path: Path) -> None:
        array = np.ones(MIB)
        assert not torch_uvm.is_managed(torch.from_numpy(array))
        assert not torch_uvm.is_managed(torch.frombuffer(bytearray(MIB), dtype=torch.uint8))
        torch.save(torch.ones(MIB), tmp_path / "x.pt")
        assert not torch_uvm.is_managed(torch.load(tmp_path / "x.pt", mmap=True))

    def test_pinned_memory(self) -> None:
        x = torch.ones(MIB).pin_memory()
        assert x.is_pinned() and not torch_uvm.is_managed(x)

    def test_shared_memory(self) -> None:
        x = torch.arange(MIB)
        assert torch_uvm.is_managed(x)
        x.share_memory_()
        assert x.is_shared() and not torch_uvm.is_managed(x) and x[-1] == MIB - 1
        assert host_bytes() == 0

    def test_numpy_sees_the_bytes(self) -> None:
        x = torch.zeros(MIB)
        x.numpy()[7] = 3.0
        assert x[7] == 3.0 and x.numpy().ctypes.data == x.data_ptr()

    def test_loaded_and_copied_contents(self) -> None:
        """torch.load allocates a CPU tensor. deepcopy and pickle create a storage, which PyTorch takes from
        its default allocator and not from the CPU allocator that is installed."""
        x = torch.arange(MIB)
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        made = [torch.load(file), pickle.loads(pickle.dumps(x)), copy.deepcopy(x)]
        assert [torch_uvm.is_managed(other) for other in made] == [True, False, False]
        assert all(torch.equal(other, x) and other.data_ptr() != x.data_ptr() for other in made)
        assert torch.UntypedStorage(MIB).nbytes() == MIB
        assert host_bytes() == 2 * x.nbytes, "x and the loaded tensor"

    def test_kernels_of_the_accelerator_do_not_take_them(self) -> None:
        """Kernels of the emulator allocate device memory through the CPU's allocator. It is not managed."""
        before = host_bytes()
        x = torch.randn(1024, 1024, device=DEVICE)
        y = torch.nn.functional.softmax(x @ x, 1).cumsum(0)
        assert host_bytes() == before
        assert torch_uvm.memory.memory_allocated(DEVICE) >= 2 * 4 * MIB
        assert torch_uvm.is_managed(y)
        del x, y

    def test_library_scratch_memory(self) -> None:
        """oneDNN allocates scratch memory with raw_allocate and frees it by its address."""
        torch.manual_seed(1)
        image = torch.randn(4, 16, 96, 96)
        layer = nn.Conv2d(16, 32, 5, padding=2)
        managed = layer(image)
        held = host_bytes()
        for _ in range(3):
            assert torch.equal(layer(image), managed)
        assert host_bytes() == held, "scratch memory leaked"
        with torch_uvm.disabled():
            assert torch.equal(layer(image), managed)

    def test_copy_on_write_is_refused(self) -> None:
        """Copy-on-write would replace the managed deleter, so it is refused, as for all managed memory."""
        x = torch.arange(MIB)
        with pytest.raises(RuntimeError, match="storage"):
            torch._lazy_clone(x)
        assert torch_uvm.is_managed(x) and x[-1] == MIB - 1
        with torch_uvm.disabled():
            assert torch.equal(torch._lazy_clone(torch.arange(10)), torch.arange(10))


def test_a_chosen_allocator_is_not_theirs() -> None:
    """Their blocks are their own, so hints reach no other tensor's bytes."""
    page = 64 << 10
    with torch_uvm.allocators.use_allocator(torch_uvm.allocators.Allocator.pool("64MiB")):
        a, b = torch.full((MIB,), 1.0), torch.full((MIB,), 2.0)
    assert torch_uvm.is_managed(a) and torch_uvm.is_managed(b)
    assert sum(size for _, size in torch_uvm._C.page_ranges([a], page)) <= a.nbytes + page
    torch_uvm.discard(a)
    assert (b == 2).all().item()
