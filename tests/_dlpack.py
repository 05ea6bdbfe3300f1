"""DLPack tensors built field by field: without a GPU no library exports managed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

MANAGED = 13
READ_ONLY = 1
INT, UINT, FLOAT, OPAQUE = 0, 1, 2, 3


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Legacy(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_python.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_python.PyCapsule_GetName.restype = ctypes.c_char_p
_python.PyCapsule_GetName.argtypes = [ctypes.py_object]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def capsule_of(pointer: int, name: bytes) -> Any:
    """Makes a capsule without a deleter."""
    return _python.PyCapsule_New(pointer, name, None)


def name_of(capsule: Any) -> str:
    return str(_python.PyCapsule_GetName(capsule).decode())


def flags_and_tensor(capsule: Any) -> tuple[int | None, Any]:
    """The fields of an unconsumed capsule. Before DLPack 1.0 there are no flags."""
    name = name_of(capsule).encode()
    made = _Versioned if name == b"dltensor_versioned" else _Legacy
    held: Any = ctypes.cast(_python.PyCapsule_GetPointer(capsule, name), ctypes.POINTER(made)).contents
    return getattr(held, "flags", None), held.tensor


class Producer:
    """Exports `array`'s bytes once, as another library would, and counts the calls of its deleter.

    version: None for the format before DLPack 1.0
    overrides: other values for the fields of the tensor: ndim, dtype (code, bits, lanes), shape, strides, ...
    """

    # Kept alive: a callback that freed its own closure would return into freed memory.
    _held: list[Producer] = []

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        *,
        device: tuple[int, int] = (MANAGED, 0),
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        **overrides: Any,
    ) -> None:
        self.array = array
        self.device = device
        self.deleted = 0
        self.asked: list[dict[str, Any]] = []
        kinds = {"i": INT, "u": UINT, "f": FLOAT}
        fields: dict[str, Any] = {
            "data": array.ctypes.data,
            "ndim": array.ndim,
            "dtype": (kinds[array.dtype.kind], array.itemsize * 8, 1),
            "shape": array.shape,
            "strides": [stride // array.itemsize for stride in array.strides],
            "byte_offset": 0,
            **overrides,
        }
        self._arrays = [self._int64s(fields["shape"]), self._int64s(fields["strides"])]
        tensor = Tensor(
            fields["data"],
            _Device(*device),
            fields["ndim"],
            _DataType(*fields["dtype"]),
            *self._arrays,
            fields["byte_offset"],
        )
        self._deleter = _Deleter(self._delete)
        self._name = b"dltensor" if version is None else b"dltensor_versioned"
        self._struct: Any = (
            _Legacy(tensor, None, self._deleter)
            if version is None
            else _Versioned(*version, None, self._deleter, flags, tensor)
        )
        self._destructor = _Deleter(self._destroy)

    @staticmethod
    def _int64s(values: Sequence[int] | None) -> Any:
        return None if values is None else (ctypes.c_int64 * len(values))(*values)

    def _delete(self, _pointer: int) -> None:
        self.deleted += 1

    def _destroy(self, capsule: int) -> None:
        if _python.PyCapsule_IsValid(capsule, self._name):  # the capsule has not been consumed
            self._delete(0)

    def capsule(self) -> Any:
        Producer._held.append(self)
        return _python.PyCapsule_New(
            ctypes.addressof(self._struct), self._name, ctypes.cast(self._destructor, ctypes.c_void_p)
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        self.asked.append(keywords)
        return self.capsule()
