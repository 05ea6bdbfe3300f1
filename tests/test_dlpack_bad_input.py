"""DLPack imports and exports that are refused by an error, without side effects."""

# torch has no stubs for its own DLPack functions; ndarray is no Buffer before Python 3.12.
# mypy: disable-error-code="attr-defined, arg-type"

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from _dlpack import OPAQUE, READ_ONLY, UINT, Producer, capsule_of, name_of
from _dlpack_tensors import labels, managed
from torch.utils.dlpack import DLDeviceType

import torch_uvm

EMU = torch.device("emu:0")
CPU, MANAGED = DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAManaged


def _array() -> np.ndarray[Any, Any]:
    return np.ones((2, 2), np.float32)


def _consumed() -> Any:
    capsule = Producer(_array()).capsule()
    torch_uvm.memory.from_dlpack(capsule)
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
        used, source = torch_uvm.memory.memory_allocated(), make()
        with pytest.raises(error, match=message):
            torch_uvm.memory.from_dlpack(source)
        gc.collect()
        assert torch_uvm.memory.memory_allocated() == used
        if isinstance(source, Producer):
            assert source.deleted == len(source.asked), "each export must be deleted once"
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
            torch_uvm.memory.from_dlpack(producer, **keywords)
        assert producer.asked == []

    def test_a_refused_capsule_is_unchanged(self) -> None:
        producer = Producer(_array(), flags=READ_ONLY)
        capsule = producer.capsule()
        with pytest.raises(BufferError):
            torch_uvm.memory.from_dlpack(capsule)
        assert name_of(capsule) == "dltensor_versioned" and producer.deleted == 0
        assert torch_uvm.memory.from_dlpack(capsule, copy=True).sum() == 4


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
        before = (torch_uvm.memory.memory_allocated(), labels(x), x.tolist())
        with pytest.raises(error, match=message):
            x.__dlpack__(**keywords)
        gc.collect()
        assert (torch_uvm.memory.memory_allocated(), labels(x), x.tolist()) == before
