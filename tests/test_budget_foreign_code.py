"""Foreign code under a budget: operators and C functions that take addresses, numpy, copies to the host."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from _budget_programs import (
    MIB,
    check,
    mlp,
    no_budget_afterwards,  # noqa: F401  (every test has it)
    parameters,
    vectors,
)

import torch_uvm


@torch.library.custom_op("torch_uvm_tests::by_address", mutates_args=("x",))
def by_address(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Reads and writes `x` (float32, contiguous) and its result through raw addresses."""
    result = torch.empty_like(x)
    there, here = _floats(result), _floats(x)
    for index in range(x.numel()):
        there[index] = here[index] * factor
        here[index] += 1.0
    return result


def _floats(x: torch.Tensor) -> Any:
    return ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float * x.numel())).contents


class TestForeignCode:
    def test_a_custom_operator_that_takes_addresses(self) -> None:
        def program() -> list[torch.Tensor]:
            small = torch.arange(512.0, device="emu").repeat(256)  # 512 KiB
            rest = [torch.full((MIB // 2,), float(i), device="emu") for i in range(10)]
            results = []
            for step in range(3):
                scaled = by_address(small, step + 0.5)
                rest = [other * 2 + scaled.sum() for other in rest]
                results += [scaled, small.clone()]
            return results + rest

        check(program, share=0.4)

    def test_a_c_function_that_is_given_an_address(self) -> None:
        """The function writes through the address, without an operator that announces the write."""
        memmove = ctypes.CDLL(None).memmove
        memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

        def program() -> list[torch.Tensor]:
            rest = [torch.full((MIB // 2,), float(i), device="emu") for i in range(12)]
            results = []
            for step in range(12):
                source, target = rest[step], rest[(step * 5 + 1) % 12]
                source.sum()  # a read: the copy on the host stays clean
                torch.accelerator.synchronize()
                bytes_of_both = source.untyped_storage().nbytes() // 2
                # Addresses of two tensors, without an operator in between.
                memmove(target.data_ptr(), source.data_ptr(), bytes_of_both)
                results.append(torch.stack([other.double().sum() for other in rest]))
                rest[(step + 3) % 12] += 1
            return results + rest

        check(program, share=0.4)

    def test_numpy_on_a_cpu_label(self) -> None:
        def program() -> list[torch.Tensor]:
            table = torch.randn(1024, 768, device="emu")  # 3 MiB, from both sides
            array = torch_uvm.to(table, "cpu").numpy()
            model = mlp(layers=6).to("emu")
            optimize = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
            results = []
            for step in range(6):
                rows = slice(step * 64, step * 64 + 64)
                array[rows] *= 0.5  # the host writes what the device reads
                loss = model(table[rows]).square().mean()
                loss.backward()
                optimize.step()
                optimize.zero_grad()
                with torch.no_grad():
                    table[rows] += 1  # the device writes what the host reads
                torch.accelerator.synchronize()
                results += [loss.detach(), torch.from_numpy(array[rows].copy())]
            return [*results, table]

        check(program)

    def test_copies_to_and_from_the_host(self) -> None:
        def program() -> list[torch.Tensor]:
            model = mlp(layers=5).to("emu")
            optimize = torch.optim.SGD(model.parameters(), lr=0.01)
            best, results = {}, []
            for step in range(6):
                loss = model(vectors().to("emu")).square().mean()
                loss.backward()
                optimize.step()
                optimize.zero_grad()
                if step == 2:
                    best = {name: value.cpu() for name, value in model.state_dict().items()}
                if step == 4:
                    model.load_state_dict(best)
                results.append(loss.detach())
            return results + parameters(model) + list(best.values())

        check(program)
