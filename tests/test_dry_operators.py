"""Single operators of dry runs: results, stand-ins, costs. The mode is entered in the tests' process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_uvm
from torch_uvm._dry import meta_kernels
from torch_uvm._dry.costs import Work, copy_us, device_us, work_of
from torch_uvm._dry.mode import DryMode
from torch_uvm._dry.results import NoResult
from torch_uvm._dry.timeline import Kernel, durations_us
from torch_uvm._tools.cards import Card

pytestmark = pytest.mark.skipif(not torch_uvm._C.emu_is_registered(), reason="needs the emulated accelerator")

CARD = Card(
    "test",
    memory_bytes=1 << 30,
    flops={"float32": 1e12, "tf32": 2e12, "bfloat16": 4e12},
    memory_rate=1e10,
    launch_us=5.0,
    host_us=1.0,
    into=1e9,
    out=2e9,
    in_place=1e9,
    efficiency={"matmul": 0.5, "convolution": 0.25, "attention": 0.1, "memory": 0.5},
)


@pytest.fixture
def dry() -> Iterator[DryMode]:
    with DryMode(CARD) as mode:
        yield mode


def big(*size: int, **options: Any) -> Tensor:
    return torch.randn(*size, device="emu", **options)


def make_operands() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(64, 3, 32, 32).to("emu"),
        "nhwc": torch.randn(64, 8, 32, 32).to("emu").contiguous(memory_format=torch.channels_last),
        "rows": torch.randn(256, 512).to("emu"),
        "half": torch.randn(256, 512).to("emu", torch.bfloat16),
        "index": torch.randint(256, (300,)).to("emu"),
        "heads": torch.randn(2, 4, 128, 64).to("emu"),
    }


OPERATORS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "mm": lambda it: it["rows"] @ it["rows"].t(),
    "addmm": lambda it: F.linear(it["half"], it["half"]),
    "broadcast": lambda it: it["rows"] + it["rows"][:1],
    "promotion": lambda it: it["rows"] * it["half"],
    "conv": lambda it: F.conv2d(it["x"], torch.ones(8, 3, 3, 3, device="emu"), padding=1),
    "conv_nhwc": lambda it: F.conv2d(it["nhwc"], torch.ones(16, 8, 3, 3, device="emu")),
    "pool": lambda it: F.max_pool2d(it["nhwc"], 2, return_indices=True),
    "layer_norm": lambda it: torch.native_layer_norm(it["rows"], [512], None, None, 1e-5),
    "group_norm": lambda it: F.group_norm(it["nhwc"], 2),
    "group_norm_backward": lambda it: torch.ops.aten.native_group_norm_backward(
        it["nhwc"].half(),
        it["nhwc"].half(),
        torch.ones(64, 2, device="emu"),
        torch.ones(64, 2, device="emu"),
        torch.ones(8, device="emu"),
        64,
        8,
        1024,
        2,
        [True, False, False],
    )[0],
    "softmax": lambda it: it["half"].softmax(-1, dtype=torch.float32),
    "topk": lambda it: it["rows"].topk(100),
    "sort": lambda it: it["rows"].sort(0),
    "index_select": lambda it: it["rows"].index_select(0, it["index"]),
    "index": lambda it: it["rows"][it["index"]],
    "cat": lambda it: torch.cat([it["rows"], it["half"]]),
    "attention": lambda it: F.scaled_dot_product_attention(it["heads"], it["heads"], it["heads"]),
    "attention_of_rows": lambda it: F.scaled_dot_product_attention(it["rows"], it["rows"], it["rows"]),
    "cumsum": lambda it: it["half"].cumsum(0),
    "to": lambda it: it["rows"].to(torch.float64),
    "cpu": lambda it: it["rows"].cpu(),
    "clone": lambda it: it["nhwc"].clone(),
    "transposed": lambda it: it["rows"].t().contiguous(),
    "zeros_like": lambda it: torch.zeros_like(it["nhwc"]),
    "split": lambda it: it["rows"].split(100),
    "foreach": lambda it: torch._foreach_sqrt([it["rows"], it["half"]]),
    "arange": lambda it: torch.arange(0, 1e5, 0.5, device="emu"),
    "one_hot": lambda it: F.one_hot(it["index"], 1000),
    "tril": lambda it: torch.ops.aten.tril(it["rows"]),
    "stft": lambda it: torch.stft(it["rows"], 64, window=torch.ones(64, device="emu"), return_complex=True),
    "ctc": lambda it: torch.ops.aten._ctc_loss(
        it["rows"].view(16, 16, 512).log_softmax(-1), it["index"][:256].view(16, 16), [16] * 16, [8] * 16
    ),
    "gamma": lambda it: torch.ops.aten._standard_gamma_grad(it["rows"], it["rows"]),
    "dirichlet": lambda it: torch.ops.aten._sample_dirichlet(it["rows"].exp()),
    "margin": lambda it: torch.ops.aten.multi_margin_loss_backward(
        it["rows"][:, 0], it["rows"], it["index"][:256], 1, 1, None, 0
    ),
}


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    return [described(it) for it in value]


@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_like_those_of_a_real_run(name: str) -> None:
    meta_kernels.register()
    operands = make_operands()
    real = described(OPERATORS[name](operands))
    with DryMode(CARD):
        assert described(OPERATORS[name](operands)) == real


def test_views_and_updates_return_their_arguments(dry: DryMode) -> None:
    x = big(512, 512)
    assert x[10:].data_ptr() == x.data_ptr() + 10 * x.stride(0) * 4
    assert x.add_(1) is x
    assert torch.mul(x, 2, out=x) is x
    before = x._version
    x.zero_()
    assert x._version == before + 1


def test_large_tensors_are_not_written_and_small_ones_are() -> None:
    large, small = torch.zeros(512, 512, device="emu"), torch.zeros(8, device="emu")
    with DryMode(CARD):
        large += 1
        small += 1
        assert small.tolist() == [1.0] * 8
    assert large.sum().item() == 0
    assert small.sum().item() == 8


def test_values_of_large_tensors_have_stand_ins(dry: DryMode) -> None:
    x = big(512, 512)
    loss = x.mean()
    assert loss.item() == 1.0
    assert not torch.isnan(x).any()
    assert torch.isfinite(x).all()
    assert torch.isfinite(loss)
    assert x[0, 0].item() == 1.0
    assert (x.long() > 0).sum().item() == 512 * 512
    assert (x >= 0).all()
    assert not (x < 0).any()
    assert (x < 0).sum().item() == 512 * 512 // 2
    assert x.argmax().item() == 0
    assert torch.equal(x, x)
    assert x.cpu().abs().sum() == 1.0  # a stand-in, too: nobody reads the zeros
    assert not x.cpu().numpy().any()
    here = {it[0]: count for it, count in dry.stand_ins.counts.items() if __file__ in it[1]}
    assert set(here) == {"item", "equal", "copy to the host"}


def test_values_of_small_tensors_are_no_stand_ins(dry: DryMode) -> None:
    tokens = torch.arange(100).to("emu")
    assert tokens.max().item() == 99
    assert (tokens > 50).sum().item() == 49
    assert torch.full((), 3.0, device="emu").item() == 3.0
    assert tokens[tokens > 95].tolist() == [96, 97, 98, 99]
    assert (tokens < 2).nonzero().tolist() == [[0], [1]]
    assert torch.unique(tokens // 50).tolist() == [0, 1]
    assert not dry.stand_ins.counts


def test_gradients_that_overflow_are_never_found(dry: DryMode) -> None:
    model = torch.nn.Linear(512, 512, device="emu")
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("emu")
    scaler.scale(model(big(512, 512)).sum()).backward()
    steps: list[object] = []
    optimizer.register_step_post_hook(lambda *it: steps.append(it))
    scaler.step(optimizer)
    assert len(steps) == 1
    assert "gradients that overflow" in {it[0] for it in dry.stand_ins.counts}


def test_attention_with_dropout_is_fused(dry: DryMode) -> None:
    # The scores alone would be 1 GiB, and the device has 256 MiB.
    heads = big(1, 4, 8192, 64, requires_grad=True)
    F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).sum().backward()


def test_an_operator_without_a_meta_kernel_is_named(dry: DryMode) -> None:
    library = torch.library.Library("torch_uvm_tests_dry", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", lambda x: x + 1, "PrivateUse1")
    try:
        with pytest.raises(NoResult, match=r"torch_uvm_tests_dry.unknown.*no meta kernel.*register_fake"):
            torch.ops.torch_uvm_tests_dry.unknown(big(512, 512))
    finally:
        library._destroy()


def test_memory_of_large_factories_on_the_host_is_reserved(dry: DryMode) -> None:
    x = torch.empty(1 << 42, dtype=torch.uint8)  # 4 TiB
    x.random_(7)
    assert (x * 2)[: 1 << 20].to("emu").shape == (1 << 20,)
    real = torch.zeros(1000)
    real += 1
    assert real.sum() == 1000


@pytest.mark.parametrize(
    ("op", "shapes", "extra", "work"),
    [
        ("mm", [(64, 32), (32, 16)], (), ("matmul", 2 * 64 * 32 * 16, 4 * (64 * 32 + 32 * 16 + 64 * 16))),
        (
            "bmm",
            [(3, 64, 32), (3, 32, 16)],
            (),
            ("matmul", 3 * 2 * 64 * 32 * 16, 3 * 4 * (64 * 32 + 32 * 16 + 64 * 16)),
        ),
        ("add", [(64, 32), (64, 32)], (), ("", 0, 3 * 4 * 64 * 32)),
        ("add_", [(64, 32), (64, 32)], (), ("", 0, 3 * 4 * 64 * 32)),
        ("fill_", [(64, 32)], (0.0,), ("", 0, 4 * 64 * 32)),
    ],
)
def test_work_by_formula(
    op: str, shapes: list[tuple[int, ...]], extra: tuple[Any, ...], work: tuple[str, int, int]
) -> None:
    packet = getattr(torch.ops.aten, op)
    overload = getattr(packet, {"add": "Tensor", "add_": "Tensor", "fill_": "Scalar"}.get(op, "default"))
    args = (*(torch.empty(it, device="meta") for it in shapes), *extra)
    results = overload(*args)
    found = work_of(overload, args, {}, results, [args[0]] if op.endswith("_") else [])
    assert (found.kind, found.flops, found.bytes) == work


def test_convolutions_and_attention_by_formula() -> None:
    x, weight = torch.empty(2, 8, 16, 16, device="meta"), torch.empty(32, 8, 3, 3, device="meta")
    rest: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = torch.ops.aten.convolution.default
    y = forward(x, weight, None, *rest)
    found = work_of(forward, (x, weight, None, *rest), {}, y, [])
    flops = 2 * (2 * 32 * 16 * 16) * 8 * 9
    # Tensor cores take 128 bytes of channels at a time, as many as 32 have.
    assert (found.kind, found.dtype, found.flops) == ("convolution", "tf32", 4 * flops)
    last = x.to(memory_format=torch.channels_last)
    assert 2 * work_of(forward, (last, weight, None, *rest), {}, y, []).bytes < found.bytes
    backward = torch.ops.aten.convolution_backward.default
    args = (y, x, weight, [0], *rest, [True, True, False])
    assert work_of(backward, args, {}, (x, weight), []).flops > 2 * 4 * flops
    grouped = (y, x, torch.empty(32, 1, 3, 3, device="meta"), [0], *rest[:-1], 8, [True, True, False])
    found = work_of(backward, grouped, {}, (x, weight), [])
    assert (found.kind, found.dtype, found.flops) == ("grouped_convolution", "float32", 2 * flops // 8)
    query = torch.empty(2, 4, 1800, 64, device="meta", dtype=torch.bfloat16)
    key = torch.empty(2, 2, 1800, 64, device="meta", dtype=torch.bfloat16)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for causal, share in ((False, 1.0), (True, 0.75)):  # half, and blocks on the diagonal
        found = work_of(attention, (query, key, key, 0.0, causal), {}, (query,), [])
        assert (found.kind, found.dtype) == ("attention", "bfloat16")
        assert found.flops == 2 * (2 * 2 * 4 * 1800 * 1800 * 64) * share


def test_what_takes_steps_one_after_another() -> None:
    scores = torch.empty(4, 32000, 100, device="meta")
    softmax = torch.ops.aten._log_softmax.default
    along = [work_of(softmax, (scores, dim, False), {}, scores, []) for dim in (-1, 1)]
    assert along[0].serial_us == 0 and along[1].serial_us > 32000
    assert device_us(along[1], CARD) == along[1].serial_us + CARD.launch_us
    one = torch.empty(1, 64, 32, 32, 32, device="meta", dtype=torch.bfloat16)
    norm = torch.ops.aten.native_batch_norm.default
    assert work_of(norm, (one, None, None, None, None, True, 0.1, 1e-5), {}, (one,), []).serial_us > 0


def test_copies_of_pageable_memory_are_slower() -> None:
    work = Work("", "float32", 0, 2 * 10**9)
    assert copy_us(work, CARD, to_host=False, pinned=True) == copy_us(work, CARD, to_host=False, pinned=False)
    assert copy_us(work, CARD, to_host=True, pinned=True) < copy_us(work, CARD, to_host=True, pinned=False)


def test_duration_is_a_roofline() -> None:
    assert device_us(Work("", "float32", 0, 5000), CARD) == pytest.approx(1.0 + 5)
    assert device_us(Work("matmul", "float32", 10**6, 5000), CARD) == pytest.approx(2.0 + 5)
    assert device_us(Work("matmul", "bfloat16", 10**6, 5000), CARD) == pytest.approx(1.0 + 5)
    assert device_us(Work("matmul", "int8", 10**6, 5000), CARD) == pytest.approx(2.0 + 5)
    assert device_us(Work("convolution", "tf32", 10**6, 0), CARD) == pytest.approx(2.0 + 5)
    assert device_us(Work("attention", "bfloat16", 10**6, 0), CARD) == pytest.approx(2.5 + 5)


def test_the_device_waits_for_the_host_and_the_host_for_the_device() -> None:
    slow_host = [Kernel(float(at), (2.0,), 10.0, False) for at in range(3)]
    assert durations_us(slow_host, [0.0, 1.0, 2.0], 1.0) == [12.0, 10.0, 10.0]
    slow_device = [Kernel(float(at), (20.0,), 1.0, False) for at in range(3)]
    assert durations_us(slow_device, [0.0, 1.0, 2.0], 1.0) == [21.0, 20.0, 20.0]
    waiting = [Kernel(float(at), (20.0,), 1.0, True) for at in range(3)]
    assert durations_us(waiting, [0.0, 1.0, 2.0], 1.0) == [21.0, 21.0, 21.0]
    # Kernels before the first operator count for nothing; several kernels may be of one operator.
    assert durations_us(slow_device, [0.5, 5.0], 1.0) == [41.0, 0.0]
    two_cards = [Kernel(0.0, (1.0, 3.0), 1.0, False)]
    assert durations_us(two_cards, [0.0], 1.0, 1) == [4.0]


def test_the_host_s_time_by_kind_of_operator(dry: DryMode) -> None:
    x = big(512, 512, requires_grad=True)
    rows = torch.arange(512, device="emu")

    def host_of(call: Callable[[], object]) -> float:
        before = len(dry.timeline.kernels)
        call()
        return sum(it.host for it in dry.timeline.kernels[before:])

    plain = host_of(x.sin)
    with torch.no_grad():
        assert host_of(x.sin) < plain
    mask = x[:, 0] > 0
    assert host_of(mask.nonzero) > plain
    assert dry.timeline.kernels[-1].waits
    x[rows].sum().backward()
    assert max(it.host for it in dry.timeline.kernels) > 2 * plain  # a sum by index sorts


def test_group_norm_does_not_compute(dry: DryMode) -> None:
    """Its kernel of the emulated accelerator has a gradient of its own."""
    x = big(2, 8, 128, 128)
    y = F.group_norm(x.requires_grad_(), 2)
    assert len([it for it in dry.timeline.kernels if it.device_us[0] > CARD.launch_us]) == 2
    assert not y.detach().cpu().numpy().any()
