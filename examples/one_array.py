"""One array in PyTorch, NumPy and CuPy: by label, DLPack and CUDA's array interface.

Each library takes the same managed tensor by its own protocol, adds its own power of ten, and releases the
tensor. No bytes are copied: there is one address, and the digits of the sum show which libraries took part.
The script lists the libraries that are not installed or need a GPU.

    python examples/one_array.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from demo import format_table
from torch import Tensor

import torch_uvm

COUNT = 1 << 20


@dataclass(frozen=True)
class Visitor:
    """A library's way to take a tensor's bytes, and the address that the result then has."""

    library: str
    protocol: str
    take: Callable[[Any, Tensor], Any]  # called with the library's module
    address: Callable[[Any], int]
    needs_cuda: bool = False


def torch_address(array: Any) -> int:
    return int(array.data_ptr())


def numpy_address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def cuda_address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


class Interface:
    """An array that offers only CUDA's array interface."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = x.__cuda_array_interface__
        self.kept = x


VISITORS = [
    Visitor("torch", "itself", lambda torch, x: x, torch_address),
    Visitor("numpy", "the CPU's label", lambda numpy, x: torch_uvm.to(x, "cpu").numpy(), numpy_address),
    Visitor("numpy", "DLPack", lambda numpy, x: numpy.from_dlpack(x, device="cpu"), numpy_address),
    Visitor("torch", "DLPack", lambda torch, x: torch_uvm.memory.from_dlpack(x), torch_address),
    Visitor(
        "torch",
        "__cuda_array_interface__",
        lambda torch, x: torch.as_tensor(Interface(x), device="cuda"),
        torch_address,
        True,
    ),
    Visitor("cupy", "__cuda_array_interface__", lambda cupy, x: cupy.asarray(x), cuda_address, True),
    Visitor("cupy", "DLPack", lambda cupy, x: cupy.from_dlpack(x), cuda_address, True),
]


def missing(visitor: Visitor, device: torch.device) -> str | None:
    """The reason why a visitor cannot take part, or None."""
    if visitor.needs_cuda and device.type != "cuda":
        return f"needs CUDA; this is {device}"
    try:
        importlib.import_module(visitor.library)
    except ImportError:
        return "not installed"
    return None


def visit(x: Tensor, visitor: Visitor, amount: int) -> int:
    """Adds `amount` to every element through the visitor's library. Returns the address that the library
    saw.

    Raises:
        AssertionError: the library has a copy, or its writes are not in `x`.
    """
    before = x[0].item()
    array = visitor.take(importlib.import_module(visitor.library), x)
    array += amount
    address = visitor.address(array)
    torch.accelerator.synchronize()  # a library may use its own stream
    if address != x.data_ptr():
        raise AssertionError(
            f"a copy: {visitor.library} has {address:#x}, the tensor is at {x.data_ptr():#x}"
        )
    if not bool((x == before + amount).all()):
        raise AssertionError(f"{visitor.library} wrote {amount}, and {x[0].item()} is there after {before}")
    return address


def main() -> None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        sys.exit("there is no accelerator, and torch_uvm registered none")
    x = torch_uvm.memory.zeros(COUNT, dtype=torch.int64, device=device)
    columns: dict[str, dict[str, str]] = {"adds": {}, "address": {}}
    left_out = []
    for number, visitor in enumerate(VISITORS):
        name = f"{visitor.library}, {visitor.protocol}"
        reason = missing(visitor, device)
        if reason is not None:
            left_out.append(f"{name}: {reason}")
            continue
        amount = 10**number
        columns["adds"][name] = f"{amount:,}"
        columns["address"][name] = f"{visit(x, visitor, amount):#x}"
    print(f"{COUNT:,} numbers on {device}, managed\n")
    print(format_table(columns))
    print(f"\nAll of them see {x[-1].item():,}, and no byte was copied.")
    for line in left_out:
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
