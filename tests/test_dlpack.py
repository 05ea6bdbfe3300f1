"""Managed memory that leaves PyTorch's hands and comes back: DLPack, and numpy on CPU labels."""

# torch has no stubs for its own DLPack functions; ndarray is no Buffer before Python 3.12.
# mypy: disable-error-code="attr-defined, arg-type"

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _dlpack import OPAQUE, READ_ONLY, UINT, Producer, capsule_of, flags_and_tensor, name_of
from _spawn import Spawn
from torch.utils.dlpack import DLDeviceType

import torch_uvm

EMU = torch.device("emu:0")
HERE = torch.device("cpu")
CPU, MANAGED = DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAManaged


def managed(*size: int, device: str = "emu") -> torch.Tensor:
    return torch_uvm.empty(*size, device=device).copy_(torch.arange(torch.Size(size).numel()).reshape(size))


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def labels(x: torch.Tensor) -> int:
    return torch_uvm._C.label_count(x.untyped_storage())


class TestExport:
    def test_cpu_label_to_numpy_shares_the_bytes(self) -> None:
        x = managed(2, 3)
        array = np.from_dlpack(torch_uvm.to(x, "cpu"))
        assert address(array) == x.data_ptr()
        array[0, 0] = 7
        assert x[0, 0].item() == 7, "seen through the device's label"
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
                    x = torch_uvm.zeros(1 << 18)
                    x.copy_(source, non_blocking=True)
                    if ask == "cpu":
                        array = np.from_dlpack(x, device="cpu")
                    else:
                        capsule = x.__dlpack__(stream=None, dl_device=(13, 0))
                        array = torch_uvm.from_dlpack(capsule, device="cpu").numpy()
                    assert array.sum() == 1 << 18, ask
        """
        for seed in (1, 2):
            spawn(code, env={"TORCH_UVM_CONF": f"emulated_schedule_seed:{seed}"})

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
        assert torch.equal(torch_uvm.from_dlpack(capsule).cpu(), x.cpu())
        array = np.from_dlpack(x, device="cpu", copy=True)
        assert address(array) != x.data_ptr() and array.tolist() == x.tolist()
        assert x.__dlpack__(dl_device=(MANAGED, 0), copy=False) is not None
        assert x.__dlpack__(dl_device=(CPU, 0), copy=False) is not None

    def test_the_capsule_keeps_the_bytes(self) -> None:
        before = torch_uvm.memory_allocated()
        x = managed(1000)
        capsule = x.__dlpack__(dl_device=(MANAGED, 0))
        del x
        gc.collect()
        assert torch_uvm.memory_allocated() > before
        y = torch_uvm.from_dlpack(capsule)
        del capsule
        assert y.sum() == 499500
        del y
        gc.collect()
        assert torch_uvm.memory_allocated() == before
        managed(8).__dlpack__(dl_device=(MANAGED, 0))
        gc.collect()
        assert torch_uvm.memory_allocated() == before, "nobody consumed that capsule"


class TestComingBack:
    @pytest.mark.parametrize("source", ["emu", "cpu"])
    @pytest.mark.parametrize("target", [None, "emu", "cpu", EMU, 0])
    def test_is_the_managed_tensor_again(self, source: str, target: Any) -> None:
        x = managed(2, 3, device=source)
        y = torch_uvm.from_dlpack(x.__dlpack__(dl_device=(MANAGED, 0)), device=target)
        assert y.device == (HERE if target == "cpu" else EMU)
        assert (y.data_ptr(), y.shape) == (x.data_ptr(), x.shape)
        assert torch_uvm.is_managed(y) and labels(y) == (1 if y.device == x.device else 2)
        assert torch_uvm.to(y, source).untyped_storage()._cdata == x.untyped_storage()._cdata

    @pytest.mark.parametrize("device", ["emu", "cpu"])
    def test_takes_managed_tensors_themselves(self, device: str) -> None:
        x = managed(4, device=device)
        y = torch_uvm.from_dlpack(x)
        assert y.device == x.device and y.data_ptr() == x.data_ptr()
        z = torch_uvm.from_dlpack(x, copy=True)
        assert z.data_ptr() != x.data_ptr() and z.tolist() == x.tolist()

    def test_shares_the_version_counter(self) -> None:
        x = managed(4)
        y = torch_uvm.from_dlpack(x)
        before = x._version
        y.add_(1)
        assert x._version > before


class TestImport:
    @pytest.mark.parametrize("version", [(1, 0), (1, 1), None])
    def test_shares_the_producers_bytes(self, version: tuple[int, int] | None) -> None:
        producer = Producer(np.arange(6, dtype=np.float32).reshape(2, 3), version=version)
        x = torch_uvm.from_dlpack(producer)
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
        x = torch_uvm.from_dlpack(capsule)
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
                x = torch_uvm.from_dlpack(producer)
                x.copy_(source, non_blocking=True)
                pending = torch_uvm._C.emu_pending_operations()
                del x
                assert producer.deleted == 1 and producer.sum == 1 << 18, producer.sum
            print(pending)
        """
        done = spawn(code, env={"TORCH_UVM_CONF": "emulated_schedule_seed:3"})
        assert int(done.stdout) > 0, "there was something to wait for"

    @pytest.mark.parametrize("version", [(1, 0), None])
    def test_strides_offsets_and_their_absence(self, version: tuple[int, int] | None) -> None:
        array = np.arange(24, dtype=np.int64).reshape(4, 6)
        x = torch_uvm.from_dlpack(Producer(array[:, ::2], version=version))
        assert x.stride() == (6, 2) and x.tolist() == array[:, ::2].tolist()
        x = torch_uvm.from_dlpack(Producer(array, version=version, strides=None))
        assert x.stride() == (6, 1) and x.tolist() == array.tolist()
        x = torch_uvm.from_dlpack(Producer(array, version=version, ndim=1, shape=[4], byte_offset=16))
        assert x.tolist() == [2, 8, 14, 20]
        x = torch_uvm.from_dlpack(Producer(array, version=version, ndim=0, shape=None, strides=None))
        assert x.shape == () and x.item() == 0
        x = torch_uvm.from_dlpack(Producer(array, version=version, shape=[0, 6], data=None))
        assert x.shape == (0, 6)

    def test_onto_the_cpu_without_a_copy(self) -> None:
        producer = Producer(np.ones(4, np.float32), device=(MANAGED, 5))
        x = torch_uvm.from_dlpack(producer, device="cpu")
        assert x.device == HERE and x.data_ptr() == address(producer.array)
        del x
        gc.collect()
        assert producer.deleted == 1

    def test_copies_where_asked_read_only_memory_too(self) -> None:
        producer = Producer(np.ones(4, np.float32), flags=READ_ONLY)
        x = torch_uvm.from_dlpack(producer, copy=True)
        assert x.data_ptr() != address(producer.array) and x.tolist() == [1] * 4
        assert producer.deleted == 1

    def test_producers_of_older_versions(self) -> None:
        class Older(Producer):
            def __dlpack__(self, **keywords: Any) -> Any:
                if keywords:
                    raise TypeError("unexpected keyword")
                return super().__dlpack__()

        producer = Older(np.ones(4, np.float32), version=None)
        assert torch_uvm.from_dlpack(producer, copy=False).tolist() == [1] * 4

    def test_all_else_is_pytorchs(self) -> None:
        array = np.arange(3.0)
        x = torch_uvm.from_dlpack(array)
        assert x.data_ptr() == address(array) and x.dtype == torch.float64
        y = torch.ones(3)
        assert torch_uvm.from_dlpack(y).data_ptr() == y.data_ptr()
        assert torch_uvm.from_dlpack(torch.utils.dlpack.to_dlpack(y)).data_ptr() == y.data_ptr()
        assert torch_uvm.from_dlpack(array, device="emu").device == EMU

    def test_cannot_be_moved_or_resized_but_copied(self) -> None:
        x = torch_uvm.from_dlpack(Producer(np.ones(4, np.float32)))
        with pytest.raises(ValueError, match="not managed"):
            torch.ops.torch_uvm.move(x, HERE)
        with pytest.raises(RuntimeError, match="not resizable"):
            x.resize_(100)
        assert x.shape == (4,) and torch_uvm.is_managed(x.to("cpu", managed=True))  # type: ignore[call-overload]


class TestNumpy:
    def test_shares_bytes_of_cpu_labels(self) -> None:
        x = managed(2, 3)
        y = torch_uvm.to(x, "cpu")
        for array in (y.numpy(), np.asarray(y), y.__array__(), np.asarray(memoryview(y.numpy()))):
            assert address(array) == x.data_ptr() and array.shape == (2, 3)
            array += 1
        assert x.tolist() == [[4, 5, 6], [7, 8, 9]], "written by the host, read by the device's kernels"

    def test_keeps_the_bytes_when_all_tensors_are_gone(self) -> None:
        before = torch_uvm.memory_allocated()
        x = managed(1000)
        array = torch_uvm.to(x, "cpu").numpy()[10:]
        del x
        gc.collect()
        assert torch_uvm.memory_allocated() > before and array.sum() == 499455
        del array
        gc.collect()
        assert torch_uvm.memory_allocated() == before

    def test_round_trip_shares_bytes_and_is_not_managed(self) -> None:
        y = managed(4, device="cpu")
        back = torch.from_numpy(y.numpy())
        assert back.data_ptr() == y.data_ptr()
        assert not torch_uvm.is_managed(back), "numpy says nothing of whose bytes they are"
        back.zero_()
        assert y.sum() == 0

    def test_device_labels_and_gradients_are_refused_as_ever(self) -> None:
        with pytest.raises(TypeError, match="emu"):
            managed(3).numpy()
        with pytest.raises(RuntimeError, match="requires grad"):
            managed(3, device="cpu").requires_grad_().numpy()


def _array() -> np.ndarray[Any, Any]:
    return np.ones((2, 2), np.float32)


def _consumed() -> Any:
    capsule = Producer(_array()).capsule()
    torch_uvm.from_dlpack(capsule)
    return capsule


IMPORTS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("no array", lambda: [1.0], TypeError, r"\[1.0\] \(list\)"),
    ("None", lambda: None, TypeError, "None"),
    ("consumed", _consumed, BufferError, "consumed"),
    ("another capsule", lambda: capsule_of(8, b"something"), BufferError, "'something'"),
    ("another version", lambda: Producer(_array(), version=(2, 0)), BufferError, r"version 2\.0"),
    ("read-only", lambda: Producer(_array(), flags=READ_ONLY), BufferError, "read-only"),
    ("four lanes", lambda: Producer(_array(), dtype=(2, 32, 4)), BufferError, "4 lanes"),
    ("no lanes", lambda: Producer(_array(), dtype=(2, 32, 0)), BufferError, "0 lanes"),
    ("opaque", lambda: Producer(_array(), dtype=(OPAQUE, 64, 1)), BufferError, "code 3"),
    ("unknown code", lambda: Producer(_array(), dtype=(99, 8, 1)), BufferError, "code 99"),
    ("seven bits", lambda: Producer(_array(), dtype=(UINT, 7, 1)), BufferError, "7 bits"),
    ("negative size", lambda: Producer(_array(), shape=[-1, 2]), BufferError, "size -1"),
    ("negative stride", lambda: Producer(_array(), strides=[-2, 1]), BufferError, "stride -2"),
    ("negative dimensions", lambda: Producer(_array(), ndim=-1), BufferError, "-1 dimensions"),
    ("no shape", lambda: Producer(_array(), shape=None), BufferError, "without a shape"),
    ("no address", lambda: Producer(_array(), data=None), BufferError, "without an address"),
    ("odd address", lambda: Producer(_array(), byte_offset=1), BufferError, "multiple of 4"),
    ("too many", lambda: Producer(_array(), shape=[2**62, 4], strides=None), BufferError, "counted"),
    ("too large", lambda: Producer(_array(), strides=[2**62, 2**62]), BufferError, "counted"),
    ("no such device", lambda: Producer(_array(), device=(MANAGED, 9)), ValueError, "index 9"),
    ("negative device", lambda: Producer(_array(), device=(MANAGED, -1)), ValueError, "index -1"),
]
NAMES = [case[0] for case in IMPORTS]


class TestBadImports:
    @pytest.mark.parametrize(
        ("make", "error", "message"), [c[1:] for c in IMPORTS], ids=[c[0] for c in IMPORTS]
    )
    def test_raises_by_name_and_lets_go_of_the_source(
        self, make: Callable[[], Any], error: type[Exception], message: str
    ) -> None:
        used, source = torch_uvm.memory_allocated(), make()
        with pytest.raises(error, match=message):
            torch_uvm.from_dlpack(source)
        gc.collect()
        assert torch_uvm.memory_allocated() == used
        if isinstance(source, Producer):
            assert source.deleted == len(source.asked), "what was given was given back once"
            assert (source.array == 1).all()

    @pytest.mark.parametrize(
        ("keywords", "error", "message"),
        [
            ({"copy": 1}, TypeError, r"1 \(int\)"),
            ({"copy": "no"}, TypeError, "'no'"),
            ({"device": "emu:7"}, ValueError, "emu:7"),
            ({"device": "meta"}, ValueError, "meta"),
            ({"device": 1.5}, TypeError, "1.5"),
            ({"stream": 1}, TypeError, "stream"),
        ],
    )
    def test_wrong_keywords(self, keywords: dict[str, Any], error: type[Exception], message: str) -> None:
        producer = Producer(_array())
        with pytest.raises(error, match=message):
            torch_uvm.from_dlpack(producer, **keywords)
        assert producer.asked == []

    def test_a_refused_capsule_is_as_it_was(self) -> None:
        producer = Producer(_array(), flags=READ_ONLY)
        capsule = producer.capsule()
        with pytest.raises(BufferError):
            torch_uvm.from_dlpack(capsule)
        assert name_of(capsule) == "dltensor_versioned" and producer.deleted == 0
        assert torch_uvm.from_dlpack(capsule, copy=True).sum() == 4


class TestBadExports:
    @pytest.mark.parametrize(
        ("change", "keywords", "error", "message"),
        [
            (lambda x: x, {"dl_device": (MANAGED, 9)}, BufferError, "9"),
            (lambda x: x, {"dl_device": (MANAGED, -1)}, BufferError, "-1"),
            (lambda x: x, {"dl_device": (MANAGED, "0")}, BufferError, "'0'"),
            (lambda x: x, {"dl_device": MANAGED}, TypeError, "dl_device"),
            (lambda x: x, {"dl_device": (MANAGED, 0), "stream": "1"}, TypeError, "stream"),
            (lambda x: x, {"dl_device": (MANAGED, 0), "copy": "yes"}, TypeError, "'yes'"),
            (lambda x: x, {"dl_device": (MANAGED, 0), "max_version": ()}, TypeError, r"max_version is \(\)"),
            (lambda x: x, {"dl_device": (MANAGED, 0), "max_version": 3}, TypeError, "max_version is 3"),
            (lambda x: x, {"dl_device": (MANAGED, 0), "max_version": ("1", 0)}, TypeError, "max_version"),
            (lambda x: x, {"dl_device": (CPU, 0), "max_version": (1,)}, TypeError, "max_version"),
            (lambda x: x, {"dl_device": (CPU, 0), "stream": 1.5}, TypeError, "stream"),
            (lambda x: x, {"dl_device": (99, 0)}, BufferError, "99"),
            (lambda x: x.requires_grad_(), {"dl_device": (MANAGED, 0)}, BufferError, "gradient"),
            (lambda x: x.requires_grad_(), {"dl_device": (CPU, 0)}, BufferError, "gradient"),
            (lambda x: x.to(torch.complex64).conj(), {"dl_device": (MANAGED, 0)}, BufferError, "conjugate"),
            (lambda x: x.to(torch.complex64).conj(), {"dl_device": (CPU, 0)}, BufferError, "conjugate"),
            (torch._neg_view, {"dl_device": (MANAGED, 0)}, BufferError, "negative bit"),
        ],
    )
    def test_raises_and_changes_nothing(
        self, change: Callable[[Any], Any], keywords: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with torch_uvm.enabled():
            x = change(managed(2, 2))
        before = (torch_uvm.memory_allocated(), labels(x), x.tolist())
        with pytest.raises(error, match=message):
            x.__dlpack__(**keywords)
        gc.collect()
        assert (torch_uvm.memory_allocated(), labels(x), x.tolist()) == before


def test_hand_made_structures_are_as_the_standard_has_them() -> None:
    """PyTorch and numpy read what the producer above gives out, on the CPU."""
    producer = Producer(np.arange(4, dtype=np.int32), device=(CPU, 0))
    assert torch.from_dlpack(producer).tolist() == [0, 1, 2, 3]
    gc.collect()
    assert producer.deleted == 1
    assert ctypes.sizeof(flags_and_tensor(Producer(_array()).capsule())[1]) == 48
