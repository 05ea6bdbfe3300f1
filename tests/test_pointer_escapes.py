"""Addresses that escape from PyTorch under a budget: `data_ptr`, numpy, DLPack, storages, compiled code."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from _pressure import (
    MIB,
    is_on_device,
    leaves,
    press,
    small_hard_budget,  # noqa: F401  (the fixture `budget`)
)

import torch_uvm
from torch_uvm import _C
from torch_uvm._patches import pointer_escapes
from torch_uvm._patches.replace import replace_once


class TestEscapes:
    @pytest.fixture
    def materialised(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Records the calls that materialise a tensor or a storage. Other tests check their effect."""
        materialised: list[str] = []
        plain, plain_storage = _C.materialise, _C.materialise_storage

        def materialise(x: torch.Tensor) -> None:
            materialised.append("tensor")
            plain(x)

        def materialise_storage(x: torch.UntypedStorage) -> None:
            materialised.append("storage")
            plain_storage(x)

        monkeypatch.setattr(_C, "materialise", materialise)
        monkeypatch.setattr(_C, "materialise_storage", materialise_storage)
        return materialised

    def test_bare_addresses_are_materialised(self, budget: int, materialised: list[str]) -> None:
        x = torch.ones(MIB // 2, device="emu")
        y = torch_uvm.to(x, "cpu")
        for give in (
            lambda: x.data_ptr(),
            lambda: torch.nn.Parameter(x).data_ptr(),
            lambda: y.numpy(),
            lambda: np.asarray(y),
        ):
            materialised.clear()
            give()
            assert materialised == ["tensor"]
        materialised.clear()
        assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        assert materialised == ["storage"] * 2

    def test_unmanaged_tensors_are_left_alone(self, budget: int, materialised: list[str]) -> None:
        x = torch.ones(4)
        x.data_ptr(), x.numpy(), x.untyped_storage().data_ptr()
        with torch_uvm.disabled():
            torch.ones(4, device="emu").data_ptr()
        torch.empty(4, device="meta").data_ptr()
        assert materialised == []
        with pytest.raises(RuntimeError, match="requires grad"):
            torch.nn.Parameter(x).numpy()

    def test_signatures_are_unchanged(self, budget: int) -> None:
        assert torch.Tensor.data_ptr.__name__ == "data_ptr" and "address" in (
            torch.Tensor.data_ptr.__doc__ or ""
        )
        with pytest.raises(TypeError):
            torch.ones(1).data_ptr(3)  # type: ignore[call-arg]

    def test_an_address_has_the_bytes(self, budget: int) -> None:
        """Also while its bytes are being moved."""
        x = torch.full((MIB // 2,), 3.0, device="emu")
        for _ in range(3):
            press(1)
            seen = np.ctypeslib.as_array(_floats(x.data_ptr()), (MIB // 2,))
            assert (seen == 3.0).all()
            x.add_(0.0)

    def test_storages_keep_their_identities(self, budget: int) -> None:
        """Programs compare storage addresses to find tied weights. All weights together may exceed the
        budget."""
        kept = [torch.full((MIB // 2,), float(i), device="emu") for i in range(12)]
        first = [x.untyped_storage().data_ptr() for x in kept]
        assert len(set(first)) == len(kept)
        assert [x.untyped_storage().data_ptr() for x in kept] == first

    @pytest.mark.parametrize("patched", [True, False], ids=["patched", "C++ alone"])
    def test_files_fill_storages_that_no_operator_has_used(
        self, budget: int, patched: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`pickle` writes at a storage's address, which a transfer ahead of the loop may be copying from."""
        if not patched and torch.__version__ < "2.13":
            pytest.skip("writes by C++ outside the dispatcher are noticed from torch 2.13 on")
        if not patched:
            monkeypatch.setattr(_C, "label_count", lambda storage: 0)
        pickled = pickle.dumps([torch.full((MIB // 4,), float(i), device="emu") for i in range(24)])
        for _ in range(8):  # the loop is learned meanwhile
            loaded = pickle.loads(pickled)
            for x in loaded:
                x.add_(1)
            assert [(x == i + 1).all().item() for i, x in enumerate(loaded)] == [True] * len(loaded)

    @pytest.mark.usefixtures("evicting")
    def test_saved_tensors_are_found_again_when_they_are_mutated(self) -> None:
        """`allow_mutation_on_saved_tensors` knows them by their addresses."""
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.full((MIB // 2,), 3.0, device="emu", requires_grad=True)
            y = x.clone()
            z = y.square().sum()
            assert not is_on_device(y)
            y.zero_()
            z.backward()
        assert x.grad is not None and (x.grad == 6.0).all().item()

    def test_an_identity_does_not_pin(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        x.untyped_storage().data_ptr(), x.data_ptr()
        assert leaves(x)

    @pytest.mark.parametrize(
        "export",
        [
            lambda x: x.__dlpack__(),
            lambda x: x.__dlpack__(max_version=(1, 0)),
            lambda x: x.__dlpack__(dl_device=(13, 0)),
            lambda x: vars(torch.utils.dlpack)["to_dlpack"](x),  # the stubs omit it
        ],
        ids=["unversioned", "versioned", "managed", "to_dlpack"],
    )
    def test_an_export_pins_until_it_is_freed(self, budget: int, export: Any) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        exported = export(x)
        assert is_on_device(x)
        address = x.data_ptr()
        press()
        assert is_on_device(x) and x.data_ptr() == address
        del exported
        gc.collect()
        assert leaves(x)

    def test_a_list_of_the_attributes_does_not_pin(
        self, budget: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`__cuda_array_interface__` pins for the tensor's life, unless `inspect.getmembers` reads it."""
        plain = property(lambda self: {"data": (self.data_ptr(), False)})
        monkeypatch.setattr(torch.Tensor, "__array_interface_on_emu__", plain, raising=False)
        replace_once(torch.Tensor, "__array_interface_on_emu__", pointer_escapes._array_interface)
        x = torch.full((MIB // 4, 2), 3.0, device="emu")
        with contextlib.suppress(RuntimeError, TypeError):  # of `imag`
            inspect.getmembers(x)
        assert leaves(x)
        assert x.__array_interface_on_emu__["data"][0] == x.data_ptr()  # type: ignore[attr-defined]
        assert not leaves(x)

    def test_imported_tensors_are_not_pinned(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        back = torch_uvm.memory.from_dlpack(x)
        assert leaves(x)
        assert back.data_ptr() == x.data_ptr() and torch.equal(back, x)

    def test_a_failed_export_pins_nothing(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu", requires_grad=True)
        with pytest.raises(BufferError):
            x.__dlpack__()
        with pytest.raises((BufferError, TypeError)):
            x.detach().__dlpack__(stream="x")
        assert leaves(x)

    def test_numpy_under_the_cpus_label_sees_what_the_device_writes(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        press()
        array = torch_uvm.to(x, "cpu").numpy()
        for value in (4.0, 5.0):
            press()
            assert (array == value - 1).all()
            x += 1
            torch.accelerator.synchronize()
            assert (array == value).all()
        array[:] = 9.0
        press()
        assert (x == 9.0).all().item()

    def test_it_is_evicted_again_after_the_cpu_label_is_gone(self, budget: int) -> None:
        """Bytes written through the CPU label are written back, although an older clean copy existed."""

        def moves() -> bool:
            address = x.data_ptr()
            for _ in range(5):
                press()
                if x.data_ptr() != address:
                    return True
            return False

        x = torch.full((MIB // 2,), 3.0, device="emu")
        assert moves()
        x.sum()
        on_cpu = torch_uvm.to(x, "cpu")
        x += 1
        assert not moves()
        torch.accelerator.synchronize()
        on_cpu *= 2
        array = on_cpu[:8].numpy()
        del on_cpu
        assert not moves()
        del array
        assert moves()
        assert (x == 8.0).all().item()
        x += 1
        assert moves()
        y = torch_uvm.to(x, "cpu")
        assert (y == 9.0).all() and y.data_ptr() == x.data_ptr()
        with pytest.raises(RuntimeError, match="resize"):
            x.resize_(MIB)
        del y
        assert x.resize_(MIB).shape == (MIB,) and (x[: MIB // 2] == 9.0).all().item()

    def test_bytes_with_only_a_cpu_label_are_not_waited_for(self, budget: int) -> None:
        """The storage on the device is freed, and its bytes live on under the CPU label."""
        x = torch.full((MIB // 2,), 3.0, device="emu")
        x += 1
        before = torch_uvm.stats()["records"]
        on_cpu = torch_uvm.to(x, "cpu").detach()
        del x
        assert torch_uvm.stats()["records"] == before - 1
        torch.accelerator.synchronize()
        assert (on_cpu == 4.0).all()
        press()
        back = torch_uvm.to(on_cpu, "emu")
        back += 1
        press()
        assert (back == 5.0).all().item() and back.data_ptr() == on_cpu.data_ptr()

    def test_the_c_interface_of_dlpack_is_not_offered(self, budget: int) -> None:
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        assert not hasattr(torch.utils.dlpack, "ReadOnlyTensorWrapper") or not hasattr(
            torch.utils.dlpack.ReadOnlyTensorWrapper, "__dlpack_c_exchange_api__"
        )

    def test_compiled_code_takes_addresses_as_before(self, budget: int) -> None:
        def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + 1 if a.data_ptr() == b.data_ptr() else a * 5

        # Before torch 2.13 a comparison of addresses splits the graph.
        whole = torch.__version__ >= "2.13"
        compiled = torch.compile(same, backend="eager", fullgraph=whole)
        x = torch.ones(3)
        assert torch.equal(compiled(x, x), same(x, x))


def _floats(address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
