"""Tensors of the emulated accelerator are made, printed, moved, viewed, resized and written like the
CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_uvm

emu: Any = torch.get_device_module("emu")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.fixture(params=["plain", "managed"], autouse=True)
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs each test with both kinds of memory."""
    with torch_uvm.enabled() if request.param == "managed" else torch_uvm.disabled():
        yield


def _equal(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Equal bytes, sizes, strides and dtype; `there` is on the accelerator."""
    assert there.device.type == "emu" and here.device.type == "cpu"
    same = (there.dtype, there.shape, there.stride()) == (here.dtype, here.shape, here.stride())
    raw = [t.cpu().contiguous().view(torch.uint8) if t.dim() else t.cpu() for t in (there, here)]
    return same and torch.equal(*raw)


class TestMethods:
    def test_emu_moves_a_tensor(self) -> None:
        x: Any = torch.arange(6.0).view(2, 3)
        assert _equal(x.emu(), x)
        assert x.emu(0).device == x.emu("emu:0").device == torch.device("emu", 0)
        assert not x.is_emu and x.emu().is_emu

    def test_emu_moves_a_module(self) -> None:
        module: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        assert module.emu() is module
        for t in (*module.parameters(), *module.buffers()):
            assert t.device == torch.device("emu", 0)

    def test_emu_moves_a_storage(self) -> None:
        here: Any = torch.arange(8, dtype=torch.uint8).untyped_storage()
        there = here.emu()
        assert there.device == torch.device("emu", 0) and there.is_emu and not here.is_emu
        assert there.cpu().tolist() == list(range(8))

    def test_emu_moves_a_packed_sequence(self) -> None:
        packed: Any = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        there = packed.emu()
        assert there.is_emu and there.data.device.type == "emu" and there.batch_sizes.is_cpu

    def test_to_the_same_device_is_the_tensor_itself(self) -> None:
        x = torch.ones(2, device="emu")
        assert x.to("emu") is x.to("emu:0") is x.to(torch.float32) is x
        assert x.to("emu", copy=True).data_ptr() != x.data_ptr()

    def test_plain_moves_copy(self) -> None:
        x = torch.ones(2, device="emu")
        here = x.cpu()
        x.zero_()
        assert here.tolist() == [1, 1]
        back = here.to("emu")
        here.zero_()
        assert back.tolist() == [1, 1]

    @pytest.mark.parametrize(
        ("value", "printed"),
        [
            (torch.arange(3), "tensor([0, 1, 2], device='emu:0')"),
            (torch.tensor(1.5), "tensor(1.5000, device='emu:0')"),
            (torch.tensor([True]), "tensor([True], device='emu:0')"),
            (torch.tensor([1 + 2j]), "tensor([1.+2.j], device='emu:0')"),
            (torch.empty(0, 3), "tensor([], device='emu:0', size=(0, 3))"),
            (torch.ones(1, dtype=torch.bfloat16), "tensor([1.], device='emu:0', dtype=torch.bfloat16)"),
        ],
    )
    def test_print(self, value: torch.Tensor, printed: str) -> None:
        assert repr(value.to("emu")) == printed

    def test_print_cuts_large_ones_short(self) -> None:
        assert "..." in repr(torch.zeros(5000, device="emu"))

    def test_numbers_and_lists(self) -> None:
        x = torch.tensor([[1.5, 2.0]], device="emu")
        assert x.tolist() == [[1.5, 2.0]] and x[0, 0].item() == 1.5 == float(x[0, 0])
        assert bool(x.sum() > 3) and int(x.sum()) == 3
        assert f"{x[0, 0]:.1f}" == "1.5"

    def test_numpy_is_refused_by_name(self) -> None:
        with pytest.raises(TypeError, match="emu:0"):
            torch.ones(2, device="emu").numpy()


class TestFactories:
    @pytest.mark.parametrize(
        "make",
        [
            lambda **on: torch.tensor([[1, 2], [3, 4]], **on),
            lambda **on: torch.as_tensor([1.5, 2.5], **on),
            lambda **on: torch.zeros(2, 3, **on),
            lambda **on: torch.ones(2, 3, dtype=torch.int16, **on),
            lambda **on: torch.full((2,), 7.0, **on),
            lambda **on: torch.arange(1, 10, 2, **on),
            lambda **on: torch.linspace(0, 1, 7, **on),
            lambda **on: torch.logspace(0, 1, 3, **on),
            lambda **on: torch.eye(3, 2, **on),
            lambda **on: torch.tril_indices(3, 3, **on),
            lambda **on: torch.hann_window(8, **on),
            lambda **on: torch.scalar_tensor(3.0, **on),
            lambda **on: torch.zeros(0, 4, **on),
            lambda **on: torch.empty(2, 3, 4, 4, memory_format=torch.channels_last, **on).fill_(1),
            lambda **on: torch.empty_strided((2, 3), (1, 2), **on).fill_(2),
            lambda **on: torch.complex(torch.ones(2, **on), torch.zeros(2, **on)),
        ],
    )
    def test_equal_the_cpus_factories(self, make: Callable[..., torch.Tensor]) -> None:
        assert _equal(make(device="emu"), make(device="cpu"))

    def test_likes_and_news_stay_on_the_device(self) -> None:
        x = torch.ones(2, 3, device="emu").t()
        made = [
            torch.empty_like(x),
            torch.zeros_like(x),
            torch.rand_like(x),
            torch.full_like(x, 2),
            x.new_zeros(2),
            x.new_empty((2, 2)),
            x.new_tensor([1.0]),
            x.new_full((2,), 3),
        ]
        assert {t.device for t in made} == {x.device}
        assert made[0].stride() == x.stride()

    def test_set_default_device(self) -> None:
        try:
            torch.set_default_device("emu")
            assert torch.get_default_device() == torch.device("emu", 0)
            made = [torch.ones(2), torch.tensor(1), torch.randn(2), torch.nn.Linear(2, 2).weight]
            host = torch.ones(2, device="cpu")
        finally:
            torch.set_default_device(None)
        assert {t.device.type for t in made} == {"emu"}
        assert host.is_cpu and torch.ones(2).is_cpu

    def test_device_as_a_context(self) -> None:
        with torch.device("emu"):
            x = torch.ones(2)
        assert x.device.type == "emu" and torch.ones(2).is_cpu

    def test_requires_grad(self) -> None:
        x = torch.ones(2, device="emu", requires_grad=True)
        (x * x).sum().backward()
        assert x.grad is not None and x.grad.device == x.device and x.grad.tolist() == [2, 2]

    def test_pinned_memory_is_the_hosts(self) -> None:
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.empty(2, device="emu", pin_memory=True)


class TestMoves:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_keep_every_dtype(self, dtype: torch.dtype) -> None:
        x = torch.arange(10).remainder(2).to(dtype)
        there = x.to("emu")
        assert _equal(there, x)
        assert torch.equal(there.cpu().view(torch.uint8), x.view(torch.uint8))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_convert_every_dtype(self, dtype: torch.dtype) -> None:
        x = torch.tensor([0.0, 1.0, 1.0, 0.0])
        assert _equal(x.to("emu", dtype), x.to(dtype))
        assert _equal(x.to("emu").to(dtype), x.to(dtype))
        assert torch.equal(x.to("emu").to("cpu", dtype).view(torch.uint8), x.to(dtype).view(torch.uint8))

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x,
            lambda x: x.transpose(1, 2),
            lambda x: x.to(memory_format=torch.channels_last),
            lambda x: x[1],
            lambda x: x[:, ::2],
            lambda x: x[..., 1:3],
            lambda x: x[0, 0, 0].expand(5, 4),
            lambda x: x[1, 1, 1, 1],
            lambda x: x[:0],
        ],
    )
    def test_keep_values_and_formats(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Strides after a move are those of a clone: dense formats are kept, and gaps are closed."""
        here = view(torch.arange(2 * 4 * 3 * 4.0).view(2, 4, 3, 4))
        there = view(torch.arange(2 * 4 * 3 * 4.0).view(2, 4, 3, 4).to("emu"))
        assert _equal(there, here)
        assert _equal(here.to("emu"), here.clone())
        assert there.cpu().stride() == here.clone().stride() and torch.equal(there.cpu(), here)

    def test_memory_format_can_be_chosen(self) -> None:
        x = torch.arange(48.0).view(1, 3, 4, 4)
        there = x.to("emu", memory_format=torch.channels_last)
        assert there.is_contiguous(memory_format=torch.channels_last) and torch.equal(there.cpu(), x)

    @pytest.mark.parametrize("lazy", ["conj", "neg", "both"])
    def test_conjugate_and_negative_views(self, lazy: str) -> None:
        def view(x: torch.Tensor) -> torch.Tensor:
            conj = x.conj()
            return conj if lazy == "conj" else (conj.imag if lazy == "neg" else torch._neg_view(conj))

        here = torch.tensor([1 + 2j, 3 - 4j])
        there = here.to("emu")
        assert view(there).is_conj() == view(here).is_conj() and view(there).is_neg() == view(here).is_neg()
        assert view(there).untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
        assert torch.equal(view(there).cpu(), view(here).resolve_conj().resolve_neg())
        assert view(here).to("emu").tolist() == view(here).tolist()
        assert (view(there) + 1).tolist() == (view(here) + 1).tolist()
        target = torch.zeros(2, dtype=here.dtype, device="emu")
        view(target).copy_(view(here))
        assert view(target).tolist() == view(here).tolist()

    def test_gradients_cross(self) -> None:
        x = torch.ones(2, requires_grad=True)
        (x.to("emu") * torch.tensor([2.0, 3.0], device="emu")).cpu().sum().backward()
        assert x.grad is not None and x.grad.is_cpu and x.grad.tolist() == [2, 3]


class TestCopies:
    @pytest.mark.parametrize(("source", "target"), [("emu", "emu"), ("cpu", "emu"), ("emu", "cpu")])
    @pytest.mark.parametrize(
        "copy",
        [
            lambda a, b: b.copy_(a),
            lambda a, b: b.t().copy_(a.t()),
            lambda a, b: b[:, ::2].copy_(a[:, 1::2]),
            lambda a, b: b.copy_(a[0]),
            lambda a, b: b.copy_(a[0, 0]),
            lambda a, b: b[1:].copy_(a[1:]),
            lambda a, b: b.view(-1)[::5].copy_(a.view(-1)[: b.view(-1)[::5].numel()]),
        ],
        ids=["whole", "transposed", "strided", "broadcast", "number", "part", "gaps"],
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
    def test_change_the_same_bytes_as_on_the_cpu(
        self, source: str, target: str, copy: Callable[[Any, Any], Any], dtype: torch.dtype
    ) -> None:
        a, b = torch.arange(24.0).view(4, 6), -torch.arange(24).view(4, 6).to(dtype)
        there = b.to(target, copy=True)
        copy(a.to(source), there)
        copy(a, b)
        assert torch.equal(there.cpu(), b)

    def test_onto_an_overlapping_self(self) -> None:
        x = torch.arange(5.0, device="emu")
        x.copy_(x)
        assert x.tolist() == [0, 1, 2, 3, 4]

    def test_of_sizes_that_do_not_fit_raise(self) -> None:
        with pytest.raises(RuntimeError, match="size"):
            torch.zeros(2, device="emu").copy_(torch.zeros(3))


class TestStorages:
    def test_views_write_through(self) -> None:
        x = torch.zeros(3, 4, device="emu")
        x[1].add_(1)
        x.t()[2].mul_(0).add_(5)
        x.view(-1)[::6] = 7
        here = torch.zeros(3, 4)
        here[1].add_(1)
        here.t()[2].mul_(0).add_(5)
        here.view(-1)[::6] = 7
        assert _equal(x, here)

    def test_in_place_results_are_the_operand(self) -> None:
        x = torch.ones(3, device="emu")
        for result in (x.add_(1), x.mul_(2), torch.relu_(x), x.copy_(torch.ones(3)), x.zero_(), x.resize_(2)):
            assert result is x

    def test_versions_count_writes(self) -> None:
        x = torch.ones(3, device="emu")
        before = x._version
        x.add_(1)
        x[0] = 2
        assert x._version == before + 2
        y = torch.ones(3, device="emu", requires_grad=True)
        z = y * 2
        w = z.exp()
        w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            w.sum().backward()

    def test_out_is_written_where_it_is(self) -> None:
        x, out = torch.ones(3, device="emu"), torch.zeros(6, device="emu")
        where = out.data_ptr()
        assert torch.add(x, x, out=out[::2]).data_ptr() == where
        assert out.tolist() == [2, 0, 2, 0, 2, 0]

    def test_out_grows_from_nothing(self) -> None:
        x = torch.arange(6.0, device="emu").view(2, 3)
        out = torch.empty(0, device="emu")
        assert torch.mul(x, 2, out=out) is out
        assert out.tolist() == [[0, 2, 4], [6, 8, 10]]
        assert out.untyped_storage().nbytes() == 24 and out.untyped_storage().device.type == "emu"

    @pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
    def test_out_changes_its_size(self) -> None:
        values, indices = torch.ones(9, device="emu"), torch.empty(0, dtype=torch.int64, device="emu")
        torch.sort(torch.tensor([3.0, 1.0, 2.0], device="emu"), out=(values, indices))
        assert values.tolist() == [1, 2, 3] and indices.tolist() == [1, 2, 0]

    def test_resize_keeps_the_bytes(self) -> None:
        x = torch.arange(4.0, device="emu")
        view = x[1:]
        x.resize_(1000, 2)
        assert x.shape == (1000, 2) and x.flatten()[:4].tolist() == [0, 1, 2, 3]
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert view.tolist() == [1, 2, 3]
        x.resize_(2)
        assert x.tolist() == [0, 1] and x.untyped_storage().nbytes() == 8000

    def test_storages_resize(self) -> None:
        x = torch.arange(4.0, device="emu")
        storage = x.untyped_storage()
        storage.resize_(8)
        assert storage.nbytes() == 8 and x[:2].tolist() == [0, 1]
        storage.resize_(0)
        assert storage.nbytes() == 0
        storage.resize_(16)
        x.fill_(3)
        assert x.tolist() == [3, 3, 3, 3]

    def test_set_takes_another_storage(self) -> None:
        x = torch.arange(10.0, device="emu")
        y: Any = torch.empty(0, device="emu")
        y.set_(x.untyped_storage(), 2, (2, 2), (4, 1))
        assert y.tolist() == [[2, 3], [6, 7]] and y.data_ptr() == x.data_ptr() + 8
        assert y.set_(x).tolist() == x.tolist()
        assert y.set_().numel() == 0 and y.device == x.device
        with pytest.raises(RuntimeError, match="emu:0.*cpu"):
            y.set_(torch.ones(2))

    def test_data_can_be_replaced(self) -> None:
        x = torch.nn.Parameter(torch.ones(2))
        x.data = torch.zeros(3, device="emu")
        assert x.device.type == "emu" and x.tolist() == [0, 0, 0] and x.is_leaf
        x.data = torch.ones(1)
        assert x.is_cpu and x.tolist() == [1]

    def test_results_share_storage_as_on_the_cpu(self) -> None:
        x = torch.arange(12.0, device="emu").view(3, 4)
        assert x.contiguous() is x and x.reshape(12).data_ptr() == x.data_ptr()
        assert x.t().contiguous().data_ptr() != x.data_ptr()
        assert torch.broadcast_tensors(x, x[0])[1].data_ptr() == x.data_ptr()
        parts = torch.split(x, 1)
        assert [p.data_ptr() - x.data_ptr() for p in parts] == [0, 16, 32]
        base = torch.ones(3, device="emu")
        assert base.view(3, 1)._base is base and base.view(3, 1)._is_view()

    def test_overlapping_writes_are_refused(self) -> None:
        x = torch.ones(1, device="emu").expand(3)
        with pytest.raises(RuntimeError, match="single memory location"):
            x.add_(1)
        y = torch.arange(5.0, device="emu")
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.add(y[1:], 1, out=y[:-1])
