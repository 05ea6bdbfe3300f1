"""Moves, for each row of the contract of `to`: managed tensors get another label and share the bytes."""

# torch has no stub for `managed=`; a Sequential has items; wrong arguments are the point of some tests.
# mypy: disable-error-code="arg-type, call-arg, call-overload, index, type-var"

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from _schedules import across_seeds
from _spawn import Spawn
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torch_uvm

EMU = torch.device("emu:0")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64]


def managed(*size: int, device: str = "emu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(size).numel()
    return torch_uvm.memory.empty(*size, device=device, dtype=dtype).copy_(
        torch.arange(count).reshape(size) % 2
    )


@pytest.mark.parametrize(("source", "target"), [("emu:0", "cpu"), ("cpu", "emu:0")])
class TestMove:
    """A move of a managed tensor that changes only the device."""

    def test_shares_bytes_and_form(self, source: str, target: str) -> None:
        x = managed(4, 6, device=source)
        y = torch_uvm.to(x, target)
        assert (y.device, x.device) == (torch.device(target), torch.device(source))
        assert y.data_ptr() == x.data_ptr()
        assert (y.shape, y.stride(), y.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
        assert torch_uvm.is_managed(y)

    def test_writes_are_seen_through_both_labels(self, source: str, target: str) -> None:
        x = managed(8, device=source)
        y = torch_uvm.to(x, target)
        y.fill_(5)
        assert x.cpu().tolist() == [5.0] * 8
        x.fill_(6)
        assert y.cpu().tolist() == [6.0] * 8

    def test_one_version_counter(self, source: str, target: str) -> None:
        x = managed(8, device=source)
        y = torch_uvm.to(x, target)
        before = x._version
        y.add_(1)
        assert x._version == y._version == before + 1

    def test_managed_keyword_of_tensor_to(self, source: str, target: str) -> None:
        x = managed(8, device=source)
        assert x.to(target, managed=True).data_ptr() == x.data_ptr()
        assert x.to(torch.device(target), torch.float32, managed=True).data_ptr() == x.data_ptr()

    def test_same_device_is_the_tensor_itself(self, source: str, target: str) -> None:
        x = managed(8, device=source)
        assert torch_uvm.to(x, source) is x
        assert torch_uvm.to(x, None) is x

    def test_round_trip_gives_the_first_storage(self, source: str, target: str) -> None:
        x = managed(8, device=source)
        back = torch_uvm.to(torch_uvm.to(x, target), source)
        assert back.untyped_storage()._cdata == x.untyped_storage()._cdata

    def test_either_label_keeps_the_bytes(self, source: str, target: str) -> None:
        used = torch_uvm.memory.memory_allocated()
        x = managed(8, device=source)
        y = torch_uvm.to(x, target)
        del x
        gc.collect()
        assert y.cpu().tolist() == [0.0, 1.0] * 4
        assert torch_uvm.memory.memory_allocated() > used
        del y
        assert torch_uvm.memory.memory_allocated() == used

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dtypes(self, source: str, target: str, dtype: torch.dtype) -> None:
        x = managed(2, 3, device=source, dtype=dtype)
        y = torch_uvm.to(x, target)
        assert y.dtype == dtype
        assert y.data_ptr() == x.data_ptr()
        assert torch.equal(x.cpu().to(torch.complex64), y.cpu().to(torch.complex64))

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x[1:3, ::2],
            lambda x: x.t(),
            lambda x: x[2, 3],
            lambda x: x[:0],
            lambda x: x.expand(2, 4, 6),
            lambda x: x.flatten()[5:],
        ],
        ids=["strided", "transposed", "0-dim", "empty", "expanded", "offset"],
    )
    def test_views(self, source: str, target: str, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = view(managed(4, 6, device=source))
        y = torch_uvm.to(x, target)
        assert (y.shape, y.stride(), y.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
        assert y.data_ptr() == x.data_ptr()
        assert torch.equal(x.cpu(), y.cpu())

    def test_conjugate_and_negative_bits(self, source: str, target: str) -> None:
        x = torch_uvm.memory.empty(3, device=source, dtype=torch.complex64).copy_(
            torch.tensor([1 + 2j, 3j, 4])
        )
        y = torch_uvm.to(x.conj(), target)
        assert y.is_conj()
        assert y.cpu().tolist() == [1 - 2j, -3j, 4]
        assert torch_uvm.to(x.conj().imag, target).cpu().tolist() == [-2.0, -3.0, 0.0]

    def test_resize_of_shared_bytes_raises_and_changes_nothing(self, source: str, target: str) -> None:
        x = torch_uvm.memory.zeros(8, device=source)
        y = torch_uvm.to(x, target)
        for label in (x, y):
            with pytest.raises(RuntimeError, match="resiz"):
                label.resize_(1 << 20)
            assert label.untyped_storage().nbytes() == 32 and label.shape == (8,)
        assert y.data_ptr() == x.data_ptr()

    def test_bytes_of_one_label_can_be_resized_again(self, source: str, target: str) -> None:
        x = torch_uvm.memory.zeros(8, device="emu")
        y = torch_uvm.to(x, "cpu")
        del y
        assert x.resize_(1 << 16).shape == (1 << 16,)

    def test_copy_asked_for_is_new_managed_memory(self, source: str, target: str) -> None:
        x = managed(8, device=source)
        y = torch_uvm.to(x, target, copy=True)
        assert y.data_ptr() != x.data_ptr()
        assert torch_uvm.is_managed(y)
        assert torch.equal(x.cpu(), y.cpu())

    def test_change_of_bytes_is_a_copy(self, source: str, target: str) -> None:
        x = managed(2, 3, 4, 4, device=source)
        half = torch_uvm.to(x, target, torch.float16)
        last = torch_uvm.to(x, target, memory_format=torch.channels_last)
        for y in (half, last):
            assert y.data_ptr() != x.data_ptr()
            assert torch_uvm.is_managed(y)
            assert y.device == torch.device(target)
            assert torch.equal(x.cpu(), y.cpu().float())
        assert last.is_contiguous(memory_format=torch.channels_last)

    def test_plain_to_is_a_copy(self, source: str, target: str) -> None:
        x = managed(8, device=source)
        y = x.to(target)
        assert y.data_ptr() != x.data_ptr()
        y.zero_()
        assert x.cpu().tolist() == [0.0, 1.0] * 4


class TestMarking:
    @pytest.mark.parametrize("device", ["cpu", "emu"])
    def test_ordinary_becomes_managed_by_a_copy(self, device: str) -> None:
        x = torch.randn(3, 5).t().to(device)
        y = x.to(device, managed=True)
        assert torch_uvm.is_managed(y)
        assert not torch_uvm.is_managed(x)
        assert y.data_ptr() != x.data_ptr()
        assert y.stride() == x.stride()
        assert torch.equal(x, y)

    @pytest.mark.parametrize("device", ["cpu", "emu"])
    def test_managed_becomes_ordinary_by_a_copy(self, device: str) -> None:
        x = managed(8, device=device)
        with torch_uvm.enabled():
            y = x.to(device, managed=False)
        assert not torch_uvm.is_managed(y)
        assert torch.equal(x, y)
        assert x.to(device, managed=None) is x

    def test_ordinary_stays_ordinary(self) -> None:
        x = torch.ones(3)
        assert torch_uvm.to(x, "cpu") is x
        assert not torch_uvm.is_managed(torch_uvm.to(x, "emu"))

    def test_gradients_pass_through_a_marking_copy(self) -> None:
        x = torch.ones(3, requires_grad=True)
        x.to("emu", managed=True).mul(2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 3

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(3, device="meta"),
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        ],
        ids=["meta", "sparse", "quantised"],
    )
    def test_tensors_without_bytes_of_their_own_raise(self, make: Callable[[], torch.Tensor]) -> None:
        with pytest.raises(ValueError, match="strided tensors with memory of their own"):
            make().to("cpu", managed=True)


class TestPlainCalls:
    """New memory, by PyTorch's rules: managed while the switch is on."""

    @pytest.mark.parametrize("switch", [True, False])
    def test_new_memory_as_the_switch_says(self, switch: bool) -> None:
        x = managed(8, device="cpu")
        with torch_uvm.enabled() if switch else torch_uvm.disabled():
            y = x.to("emu")
        assert torch_uvm.is_managed(y) is switch
        assert y.data_ptr() != x.data_ptr()
        assert not torch_uvm.is_managed(y.cpu())

    def test_module_to_copies(self) -> None:
        model = nn.Linear(4, 4)
        torch_uvm.to(model, "emu", managed=True)
        address, weight = model.weight.data_ptr(), model.weight
        model.to("cpu")
        assert model.weight is weight
        assert weight.data_ptr() != address
        assert not torch_uvm.is_managed(weight)

    def test_to_the_cpu_waits_and_non_blocking_into_pinned_memory_does_not(self) -> None:
        x = managed(1 << 16)
        pinned = torch.empty(1 << 16, pin_memory=True)

        def waits(call: Callable[[], object]) -> int:
            before = torch_uvm.emulated.counters()["synchronisations"]
            call()
            return torch_uvm.emulated.counters()["synchronisations"] - before

        pageable = torch.empty(1 << 16)
        assert waits(lambda: x.cpu()) == 1
        assert waits(lambda: pageable.copy_(x, non_blocking=True)) == 1
        assert waits(lambda: pinned.copy_(x, non_blocking=True)) == 0
        assert waits(lambda: x.to("cpu", non_blocking=True)) == 0  # PyTorch allocates pinned memory for this
        torch.accelerator.synchronize()
        assert torch.equal(pinned, x.cpu())


class TestOtherKinds:
    """Meta, sparse and quantised tensors and wrapper subclasses behave as in PyTorch; `managed=True`
    raises."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(3, device="meta"),
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            lambda: TwoTensor(torch.ones(3), torch.zeros(3)),
            lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
            lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
        ],
        ids=["meta", "sparse", "quantised", "wrapper subclass", "nested", "jagged"],
    )
    def test_as_pytorch_does_and_managed_raises(self, make: Callable[[], torch.Tensor]) -> None:
        x = make()
        assert not torch_uvm.is_managed(x)
        for managed_too in (False, None):
            y = torch_uvm.to(x, None, managed=managed_too)
            assert type(y) is type(x)
            assert (y.device, y.layout, y.dim()) == (x.device, x.layout, x.dim())
            assert x.is_nested or y.shape == x.shape
        for call in (lambda: x.to("cpu", managed=True), lambda: torch_uvm.to(x, "emu", managed=True)):
            with pytest.raises(ValueError, match="strided tensors with memory of their own"):
                call()

    def test_nested_tensors_on_managed_bytes(self) -> None:
        """Nested tensors are accepted without internal errors. Their bytes are counted, but they are not
        moved."""
        sizes, strides = torch.tensor([[3], [2]]), torch.tensor([[1], [1]])
        parts = torch._nested_view_from_buffer(
            torch_uvm.memory.ones(5, device="cpu"), sizes, strides, torch.tensor([0, 3])
        )
        assert not torch_uvm.is_managed(parts)
        for hint in (torch_uvm.prefetch, torch_uvm.discard, torch_uvm.advise):
            with pytest.raises(ValueError, match="not managed"):
                hint(parts)
            hint([parts])
        with pytest.raises(ValueError, match="strided tensors with memory of their own"):
            torch_uvm.residency(parts)
        assert torch_uvm.residency([parts]) == {}
        assert [t.tolist() for t in torch_uvm.to(parts, "cpu").unbind()] == [[1.0] * 3, [1.0] * 2]


class TestSynchronisation:
    def test_to_the_cpu_waits_unless_asked_not_to(self, spawn: Spawn) -> None:
        """Twenty schedules of delayed copies: correct with the wait, wrong under some schedule without it."""
        trial = """
            x = torch_uvm.memory.zeros(1 << 18)
            source = torch.ones(1 << 18).pin_memory()
            x.copy_(source, non_blocking=True)
            return int(torch_uvm.to(x, "cpu", non_blocking=NON_BLOCKING).sum().item()) != 1 << 18
        """
        wrong = [
            across_seeds(spawn, trial.replace("NON_BLOCKING", str(non_blocking)))
            for non_blocking in (False, True)
        ]
        assert wrong == [0, 1]

    def test_to_a_device_waits_for_nothing(self) -> None:
        x = managed(1 << 16, device="cpu")
        before = torch_uvm.emulated.counters()["synchronisations"]
        torch_uvm.to(x, "emu")
        assert torch_uvm.emulated.counters()["synchronisations"] == before

    def test_to_a_device_starts_moving_the_range(self) -> None:
        x = managed(1 << 20, device="cpu")
        x.add_(1)
        torch_uvm.to(x[: 1 << 19], "emu")
        assert torch_uvm.emulated.residency(x[: 1 << 19])[EMU] == 4 << 19

    def test_between_devices(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            x = torch_uvm.memory.zeros(1 << 16, device="emu:0")
            y = torch_uvm.to(x, "emu:1")
            assert y.device.index == 1 and y.data_ptr() == x.data_ptr()
            x.add_(2)
            assert y.sum().item() == 2 << 16
            assert torch_uvm.to(y, "emu:0").untyped_storage()._cdata == x.untyped_storage()._cdata
            """,
            env={"TORCH_UVM_CONF": "emulated_devices:2"},
        )


class TestBadInput:
    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (lambda: torch_uvm.to([1], "cpu"), TypeError, r"\[1\] \(list\)"),
            (lambda: torch_uvm.to(torch.ones(2), "emu:9"), ValueError, "emu:9"),
            (lambda: torch_uvm.to(torch.ones(2), "nowhere"), ValueError, "nowhere"),
            (lambda: torch_uvm.to(torch.ones(2), 1.5), TypeError, "1.5"),
            (lambda: torch_uvm.to(torch.ones(2), "cpu", "float32"), TypeError, "float32"),
            (lambda: torch_uvm.to(torch.ones(2), "cpu", managed="yes"), TypeError, "'yes'"),
            (lambda: torch_uvm.to(torch.ones(2), "cpu", copy=None), TypeError, "None"),
            (lambda: torch_uvm.to(torch.ones(2), "cpu", non_blocking=2), TypeError, "2"),
            (lambda: torch_uvm.to(torch.ones(2), "cpu", manage=True), TypeError, "manage"),
            (lambda: torch_uvm.to(torch.ones(2), "cpu", memory_format=3), TypeError, r"memory_format is 3 "),
            (
                lambda: torch_uvm.to(torch_uvm.memory.ones(2), 0, memory_format=None),
                TypeError,
                "format is None",
            ),
            (lambda: torch_uvm.to(nn.Linear(2, 2), "cpu", torch.int8), TypeError, "dtype is torch.int8"),
            (lambda: torch.ones(2).to("cpu", managed=1), TypeError, "1"),
            (lambda: torch.ops.torch_uvm.move(torch.ones(2), EMU), ValueError, "not managed"),
            (
                lambda: torch.ops.torch_uvm.move(torch_uvm.memory.ones(2), torch.device("meta")),
                ValueError,
                "meta",
            ),
            (
                lambda: torch.ops.torch_uvm.move(torch_uvm.memory.ones(2), torch.device("emu:5")),
                ValueError,
                "5",
            ),
        ],
    )
    def test_raises_by_name(self, call: Callable[[], object], error: type[Exception], message: str) -> None:
        used = torch_uvm.memory.memory_allocated()
        with pytest.raises(error, match=message):
            call()
        gc.collect()
        assert torch_uvm.memory.memory_allocated() == used
