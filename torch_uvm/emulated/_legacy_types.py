"""Legacy types such as `torch.emu.FloatTensor`: for `isinstance` and `type()`, and as constructors."""

from __future__ import annotations

from typing import Any

import torch

_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}

NAMES = sorted(_DTYPES)


class _LegacyType(type):
    """The metaclass of these types: device and dtype decide what is an instance."""

    dtype: torch.dtype
    cpu_name: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == "emu"
            and instance.dtype is cls.dtype
        )

    def __call__(cls, *args: Any, device: torch.device | str | int | None = None) -> torch.Tensor:
        """Like the CPU's type of the same name: from sizes, a torch.Size, numbers, or a tensor of this type.

        Raises:
            TypeError: a tensor of another type.
            RuntimeError: `device` is not an `emu` device.
        """
        where = torch.device("emu", device) if isinstance(device, int) else torch.device(device or "emu")
        if where.type != "emu":
            raise RuntimeError(
                f"legacy constructor expects device type: emu but device type: {where.type} was passed"
            )
        if args and isinstance(args[0], torch.Tensor):
            if len(args) != 1 or not cls.__instancecheck__(args[0]):
                raise TypeError(f"expected {cls.__name__} (got {args[0].type()})")
            same: torch.Tensor = torch.ops.aten.alias(args[0])
            return same
        made: torch.Tensor = getattr(torch, cls.cpu_name)(*args)
        return made.to(where)


def legacy_type(name: str) -> _LegacyType:
    """The type of one of NAMES. Its name includes the module, as Tensor.type() looks it up."""
    full_name = f"torch.emu.{name}"
    return _LegacyType(full_name, (), {"dtype": _DTYPES[name], "cpu_name": name, "__module__": "torch.emu"})


TYPES = {name: legacy_type(name) for name in NAMES}
