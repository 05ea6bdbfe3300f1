"""Managed memory exported through DLPack and imported again, and numpy arrays of CPU labels."""

# torch has no stubs for its own DLPack functions; ndarray is no Buffer before Python 3.12.
# mypy: disable-error-code="attr-defined, arg-type"

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _dlpack import READ_ONLY, flags_and_tensor, name_of
from _dlpack_tensors import address, labels, managed
from _spawn import Spawn
from torch.utils.dlpack import DLDeviceType

import torch_uvm

HERE_FOLDER = Path(__file__).parent
EMU = torch.device("emu:0")
HERE = torch.device("cpu")
CPU, MANAGED = DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAManaged


class TestExport:
    def test_cpu_label_to_numpy_shares_the_bytes(self) -> None:
        x = managed(2, 3)
        array = np.from_dlpack(torch_uvm.to(x, "cpu"))
        assert address(array) == x.data_ptr()
        array[0, 0] = 7
        assert x[0, 0].item() == 7, "the device's label does not see the write"
        x.add_(1)
        torch.accelerator.synchronize()
        assert array.tolist() == [[8, 2, 3], [4, 5, 6]]

    def test_device_label_to_the_cpu_shares_the_bytes(self) -> None:
        x = managed(2, 3).t()
        array = np.from_dlpack(x, device="cpu")
        assert address(array) == x.data_ptr()
        assert array.shape == (3, 2) and array.strides == (4, 12)
        assert labels(x) == 2
        del array
        gc.collect()
        assert labels(x) == 1

    def test_plain_device_tensors_go_pytorchs_way(self) -> None:
        x = torch.ones(3, device="emu")
        array = np.from_dlpack(x, device="cpu")
        assert address(array) != x.data_ptr()
        with pytest.raises(BufferError, match="13"):
            x.__dlpack__(dl_device=(MANAGED, 0))

    def test_waits_for_pending_work(self, spawn: Spawn) -> None:
        code = """
            import numpy as np, torch, torch_uvm
            source = torch.ones(1 << 18).pin_memory()
            for ask in ("cpu", "managed"):
                for _ in range(5):
                    x = torch_uvm.memory.zeros(1 << 18)
                    x.copy_(source, non_blocking=True)
                    if ask == "cpu":
                        array = np.from_dlpack(x, device="cpu")
                    else:
                        capsule = x.__dlpack__(stream=None, dl_device=(13, 0))
                        array = torch_uvm.memory.from_dlpack(capsule, device="cpu").numpy()
                    assert array.sum() == 1 << 18, ask
        """
        for seed in (1, 2):
            spawn(code, env={"TORCH_UVM_CONF": f"emulated_schedule_seed:{seed}"})

    def test_waits_for_the_fetch_of_evicted_bytes(self, spawn: Spawn) -> None:
        code = f"""
            import ctypes, sys, torch, torch_uvm
            sys.path.insert(0, {str(HERE_FOLDER)!r})
            from _dlpack import flags_and_tensor
            torch_uvm.enable(budget="8MiB")
            for round in range(10):
                x = torch.full((1 << 20,), 3.0, device="emu")
                for _ in range(4):
                    torch.ones(7 << 18, device="emu").add_(1)
                assert torch_uvm.residency(x) == {{torch.device("cpu"): 4 << 20}}
                capsule = x.__dlpack__(stream=None, dl_device=(13, 0))
                address = flags_and_tensor(capsule)[1].data
                seen = ctypes.string_at(address, 4 << 20)
                assert torch.frombuffer(seen, dtype=torch.float32).eq(3).all(), round
                del capsule
        """
        spawn(code, env={"TORCH_UVM_CONF": "emulated_schedule_seed:1"})

    def test_minus_one_as_the_stream_waits_for_nothing(self) -> None:
        x = managed(4)
        before = torch_uvm.emulated.counters()["synchronisations"]
        x.__dlpack__(stream=-1, dl_device=(MANAGED, 0))
        assert torch_uvm.emulated.counters()["synchronisations"] == before

    @pytest.mark.parametrize("device", ["emu", "cpu"])
    @pytest.mark.parametrize("versioned", [True, False])
    def test_managed_device_type(self, device: str, versioned: bool) -> None:
        x = managed(4, 6, device=device)[1:3, ::2]
        capsule = x.__dlpack__(max_version=(1, 0) if versioned else None, dl_device=(MANAGED, 0))
        assert name_of(capsule) == ("dltensor_versioned" if versioned else "dltensor")
        flags, tensor = flags_and_tensor(capsule)
        assert flags == (0 if versioned else None)
        assert (tensor.device.device_type, tensor.device.device_id) == (MANAGED, 0)
        assert tensor.data + tensor.byte_offset == x.data_ptr()
        assert (tensor.shape[:2], tensor.strides[:2]) == ([2, 3], [6, 2])
        assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (2, 32, 1)

    def test_zero_size_has_no_address(self) -> None:
        capsule = managed(0, 3).__dlpack__(dl_device=(MANAGED, 0))
        tensor = flags_and_tensor(capsule)[1]
        assert tensor.data is None and tensor.shape[:2] == [0, 3]

    def test_a_copy_where_it_is_asked_for(self) -> None:
        x = managed(2, 3).t()
        capsule = x.__dlpack__(max_version=(1, 0), dl_device=(MANAGED, 0), copy=True)
        flags, tensor = flags_and_tensor(capsule)
        assert flags == 2 and tensor.data != x.data_ptr() and tensor.strides[:2] == [1, 3]
        assert torch.equal(torch_uvm.memory.from_dlpack(capsule).cpu(), x.cpu())
        array = np.from_dlpack(x, device="cpu", copy=True)
        assert address(array) != x.data_ptr() and array.tolist() == x.tolist()
        assert x.__dlpack__(dl_device=(MANAGED, 0), copy=False) is not None
        assert x.__dlpack__(dl_device=(CPU, 0), copy=False) is not None

    @pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch does not export as read-only")
    def test_read_only_where_it_is_asked_for(self) -> None:
        x, read_only = managed(2, 3), {"max_version": (1, 0), "read_only": True}
        for source in (x, torch_uvm.to(x, "cpu")):
            flags, tensor = flags_and_tensor(source.__dlpack__(dl_device=(CPU, 0), **read_only))
            assert (flags, tensor.data) == (READ_ONLY, x.data_ptr())
            array = np.from_dlpack(torch.utils.dlpack.ReadOnlyTensorWrapper(source), device="cpu")
            assert address(array) == x.data_ptr() and not array.flags.writeable
        with pytest.raises(BufferError, match="read-only"):
            x.__dlpack__(dl_device=(MANAGED, 0), **read_only)

    def test_the_capsule_keeps_the_bytes(self) -> None:
        before = torch_uvm.memory.memory_allocated()
        x = managed(1000)
        capsule = x.__dlpack__(dl_device=(MANAGED, 0))
        del x
        gc.collect()
        assert torch_uvm.memory.memory_allocated() > before
        y = torch_uvm.memory.from_dlpack(capsule)
        del capsule
        assert y.sum() == 499500
        del y
        gc.collect()
        assert torch_uvm.memory.memory_allocated() == before
        managed(8).__dlpack__(dl_device=(MANAGED, 0))
        gc.collect()
        assert torch_uvm.memory.memory_allocated() == before, "an unconsumed capsule leaks"


class TestComingBack:
    @pytest.mark.parametrize("source", ["emu", "cpu"])
    @pytest.mark.parametrize("target", [None, "emu", "cpu", EMU, 0])
    def test_is_the_managed_tensor_again(self, source: str, target: Any) -> None:
        x = managed(2, 3, device=source)
        y = torch_uvm.memory.from_dlpack(x.__dlpack__(dl_device=(MANAGED, 0)), device=target)
        assert y.device == (HERE if target == "cpu" else EMU)
        assert (y.data_ptr(), y.shape) == (x.data_ptr(), x.shape)
        assert torch_uvm.is_managed(y) and labels(y) == (1 if y.device == x.device else 2)
        assert torch_uvm.to(y, source).untyped_storage()._cdata == x.untyped_storage()._cdata

    @pytest.mark.parametrize("device", ["emu", "cpu"])
    def test_takes_managed_tensors_themselves(self, device: str) -> None:
        x = managed(4, device=device)
        y = torch_uvm.memory.from_dlpack(x)
        assert y.device == x.device and y.data_ptr() == x.data_ptr()
        z = torch_uvm.memory.from_dlpack(x, copy=True)
        assert z.data_ptr() != x.data_ptr() and z.tolist() == x.tolist()

    def test_shares_the_version_counter(self) -> None:
        x = managed(4)
        y = torch_uvm.memory.from_dlpack(x)
        before = x._version
        y.add_(1)
        assert x._version > before


class TestNumpy:
    def test_shares_bytes_of_cpu_labels(self) -> None:
        x = managed(2, 3)
        y = torch_uvm.to(x, "cpu")
        for array in (y.numpy(), np.asarray(y), y.__array__(), np.asarray(memoryview(y.numpy()))):
            assert address(array) == x.data_ptr() and array.shape == (2, 3)
            array += 1
        assert x.tolist() == [[4, 5, 6], [7, 8, 9]], "the device does not see the host's write"

    def test_keeps_the_bytes_when_all_tensors_are_gone(self) -> None:
        before = torch_uvm.memory.memory_allocated()
        x = managed(1000)
        array = torch_uvm.to(x, "cpu").numpy()[10:]
        del x
        gc.collect()
        assert torch_uvm.memory.memory_allocated() > before and array.sum() == 499455
        del array
        gc.collect()
        assert torch_uvm.memory.memory_allocated() == before

    def test_round_trip_shares_bytes_and_is_not_managed(self) -> None:
        y = managed(4, device="cpu")
        back = torch.from_numpy(y.numpy())
        assert back.data_ptr() == y.data_ptr()
        assert not torch_uvm.is_managed(back), "numpy does not export the owner"
        back.zero_()
        assert y.sum() == 0

    def test_device_labels_and_gradients_are_refused(self) -> None:
        with pytest.raises(TypeError, match="emu"):
            managed(3).numpy()
        with pytest.raises(RuntimeError, match="requires grad"):
            managed(3, device="cpu").requires_grad_().numpy()
