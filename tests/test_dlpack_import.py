"""Memory of other producers, imported through DLPack as managed memory."""

# torch has no stubs for its own DLPack functions; ndarray is no Buffer before Python 3.12.
# mypy: disable-error-code="attr-defined, arg-type"

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _dlpack import READ_ONLY, Producer, flags_and_tensor, name_of
from _dlpack_tensors import address
from _spawn import Spawn
from torch.utils.dlpack import DLDeviceType

import torch_uvm

EMU = torch.device("emu:0")
HERE = torch.device("cpu")
CPU, MANAGED = DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAManaged


class TestImport:
    @pytest.mark.parametrize("version", [(1, 0), (1, 1), None])
    def test_shares_the_producers_bytes(self, version: tuple[int, int] | None) -> None:
        producer = Producer(np.arange(6, dtype=np.float32).reshape(2, 3), version=version)
        x = torch_uvm.memory.from_dlpack(producer)
        assert (x.device, x.dtype, x.shape, x.stride()) == (EMU, torch.float32, (2, 3), (3, 1))
        assert x.data_ptr() == address(producer.array)
        assert not torch_uvm.is_managed(x), "the bytes are the producer's"
        x.mul_(2)
        torch.accelerator.synchronize()
        assert producer.array.tolist() == [[0, 2, 4], [6, 8, 10]]
        producer.array[1, 2] = 50
        assert x.cpu().tolist() == [[0, 2, 4], [6, 8, 50]]
        assert producer.asked == [{"max_version": (1, 0)}]

    def test_the_deleter_is_called_once_when_the_last_tensor_is_gone(self) -> None:
        producer = Producer(np.ones(4, np.float32))
        capsule = producer.capsule()
        x = torch_uvm.memory.from_dlpack(capsule)
        assert name_of(capsule) == "used_dltensor_versioned"
        view = x[1:]
        del x, capsule
        gc.collect()
        assert producer.deleted == 0
        del view
        gc.collect()
        assert producer.deleted == 1

    def test_the_deleter_is_called_when_queued_work_is_done(self, spawn: Spawn) -> None:
        code = f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import numpy as np, torch, torch_uvm
            from _dlpack import Producer

            class Watching(Producer):
                def _delete(self, pointer):
                    super()._delete(pointer)
                    self.sum = self.array.sum()

            source = torch.ones(1 << 18).pin_memory()
            for _ in range(5):
                producer = Watching(np.zeros(1 << 18, np.float32))
                x = torch_uvm.memory.from_dlpack(producer)
                x.copy_(source, non_blocking=True)
                pending = torch_uvm._C.emu_pending_operations()
                del x
                assert producer.deleted == 1 and producer.sum == 1 << 18, producer.sum
            print(pending)
        """
        done = spawn(code, env={"TORCH_UVM_CONF": "emulated_schedule_seed:3"})
        assert int(done.stdout) > 0, "no work was pending"

    @pytest.mark.parametrize("version", [(1, 0), None])
    def test_strides_offsets_and_their_absence(self, version: tuple[int, int] | None) -> None:
        array = np.arange(24, dtype=np.int64).reshape(4, 6)
        x = torch_uvm.memory.from_dlpack(Producer(array[:, ::2], version=version))
        assert x.stride() == (6, 2) and x.tolist() == array[:, ::2].tolist()
        x = torch_uvm.memory.from_dlpack(Producer(array, version=version, strides=None))
        assert x.stride() == (6, 1) and x.tolist() == array.tolist()
        x = torch_uvm.memory.from_dlpack(Producer(array, version=version, ndim=1, shape=[4], byte_offset=16))
        assert x.tolist() == [2, 8, 14, 20]
        x = torch_uvm.memory.from_dlpack(Producer(array, version=version, ndim=0, shape=None, strides=None))
        assert x.shape == () and x.item() == 0
        x = torch_uvm.memory.from_dlpack(Producer(array, version=version, shape=[0, 6], data=None))
        assert x.shape == (0, 6)

    def test_onto_the_cpu_without_a_copy(self) -> None:
        producer = Producer(np.ones(4, np.float32), device=(MANAGED, 5))
        x = torch_uvm.memory.from_dlpack(producer, device="cpu")
        assert x.device == HERE and x.data_ptr() == address(producer.array)
        del x
        gc.collect()
        assert producer.deleted == 1

    def test_copies_where_asked_read_only_memory_too(self) -> None:
        producer = Producer(np.ones(4, np.float32), flags=READ_ONLY)
        x = torch_uvm.memory.from_dlpack(producer, copy=True)
        assert x.data_ptr() != address(producer.array) and x.tolist() == [1] * 4
        assert producer.deleted == 1

    def test_producers_of_older_versions(self) -> None:
        class Older(Producer):
            def __dlpack__(self, **keywords: Any) -> Any:
                if keywords:
                    raise TypeError("unexpected keyword")
                return super().__dlpack__()

        producer = Older(np.ones(4, np.float32), version=None)
        assert torch_uvm.memory.from_dlpack(producer, copy=False).tolist() == [1] * 4

    def test_other_memory_is_imported_by_pytorch(self) -> None:
        array = np.arange(3.0)
        x = torch_uvm.memory.from_dlpack(array)
        assert x.data_ptr() == address(array) and x.dtype == torch.float64
        y = torch.ones(3)
        assert torch_uvm.memory.from_dlpack(y).data_ptr() == y.data_ptr()
        assert torch_uvm.memory.from_dlpack(torch.utils.dlpack.to_dlpack(y)).data_ptr() == y.data_ptr()
        assert torch_uvm.memory.from_dlpack(array, device="emu").device == EMU

    def test_cannot_be_moved_or_resized_but_copied(self) -> None:
        x = torch_uvm.memory.from_dlpack(Producer(np.ones(4, np.float32)))
        with pytest.raises(ValueError, match="not managed"):
            torch.ops.torch_uvm.move(x, HERE)
        with pytest.raises(RuntimeError, match="not resizable"):
            x.resize_(100)
        assert x.shape == (4,) and torch_uvm.is_managed(x.to("cpu", managed=True))  # type: ignore[call-overload]


def _array() -> np.ndarray[Any, Any]:
    return np.ones((2, 2), np.float32)


def test_hand_made_structures_are_as_the_standard_has_them() -> None:
    """PyTorch and numpy can read the structures that this file's producer makes on the CPU."""
    producer = Producer(np.arange(4, dtype=np.int32), device=(CPU, 0))
    assert torch.from_dlpack(producer).tolist() == [0, 1, 2, 3]
    gc.collect()
    assert producer.deleted == 1
    assert ctypes.sizeof(flags_and_tensor(Producer(_array()).capsule())[1]) == 48
