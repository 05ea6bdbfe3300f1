"""Values that a dry run makes up, the shapes that follow from them, and what it says of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _spawn import Spawn
from test_dry_operators import CARD, big
from test_dry_runs import real_run, run_dry
from test_plan_dry import plan
from torch.nn import functional as F

import torch_uvm
from torch_uvm._dry.mode import DryMode

pytestmark = pytest.mark.skipif(not torch_uvm._C.emu_is_registered(), reason="needs the emulated accelerator")

ROUTED = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

device = torch.accelerator.current_accelerator()
torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(128, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 128)) for _ in range(8)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if token.numel():
                y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y


model = nn.Sequential(*(Experts() for _ in range(2))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.randn(8192, 128, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def dry() -> Iterator[DryMode]:
    with DryMode(CARD) as mode:
        yield mode


def test_shapes_that_depend_on_values(dry: DryMode) -> None:
    x = big(300, 200)
    assert x.nonzero().shape == (60000, 2)
    assert x[x > 0].shape == (30000,)
    assert x[x[:, 0] > 0].shape == (150, 200)
    assert x.masked_select(x > 0).shape == (30000,)
    assert torch.where(x > 0)[1].shape == (30000,)
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert (values.shape, inverse.shape, counts.shape) == ((60000,), (300, 200), (60000,))
    rows, inverse = torch.unique_consecutive(x, return_inverse=True, dim=0)
    assert (rows.shape, inverse.shape) == ((300, 200), (300,))
    assert torch.bincount(x.argmax(1), weights=big(300), minlength=250).shape == (250,)
    assert x.repeat_interleave(x[:, 0].round().long(), dim=0).shape == (300, 200)
    names = {"nonzero", "index", "masked_select", "unique2", "unique_consecutive"}
    names |= {"bincount", "repeat_interleave"}
    assert {it[0] for it in dry.stand_ins.counts} == names
    assert all(__file__ in place for _, place in dry.stand_ins.counts)


def test_masks_of_hundreds_of_mebibytes_have_no_values(dry: DryMode) -> None:
    x = torch.empty(1 << 25, dtype=torch.bfloat16, device="emu")
    assert x[x > 0].shape == x.masked_select(x > 0).shape == (1 << 24,)


def test_a_router_uses_its_experts_alike(dry: DryMode) -> None:
    chosen = big(4096, 16).softmax(-1).topk(2).indices
    assert torch.bincount(chosen.flatten(), minlength=16).tolist() == [512] * 16
    assert (chosen[:, 0] != chosen[:, 1]).all()
    assert big(4096, 16).argmax(-1).bincount().tolist() == [256] * 16
    assert big(4096, 16).softmax(-1).multinomial(1).flatten().bincount().tolist() == [256] * 16
    order = big(64, 512).argsort(0)
    assert order.sort(0).values[:, 7].tolist() == list(range(64))


def test_a_mask_is_as_dense_as_expected(dry: DryMode) -> None:
    x = torch.rand(256, 512, device="emu")
    assert (x < 0.15).float().mean().item() == 1.0  # of real numbers nothing is known
    assert (x < 0.15).sum().item() == pytest.approx(0.15 * 256 * 512, abs=1)
    assert (x >= 0.15).sum().item() == pytest.approx(0.85 * 256 * 512, abs=1)


def test_a_mask_selects_as_much_of_a_known_tensor(dry: DryMode) -> None:
    """Both sides of a masked loss have the same length, whoever of them has values."""
    logits, labels = big(4096, 100, requires_grad=True), torch.arange(4096, device="emu") % 100
    few = torch.arange(4096) % 10 == 0
    for mask in (few, few.to("emu"), logits[:, 0] > 0):
        chosen, wanted = logits[mask], labels[mask]
        assert chosen.shape[0] == wanted.shape[0] == mask.sum().item()
        F.cross_entropy(chosen, wanted).backward()
    indexed = [count for (what, _), count in dry.stand_ins.counts.items() if what == "index"]
    assert sum(indexed) == 2  # by the last mask; the others have values


def test_attention_whose_mask_has_a_gradient(dry: DryMode) -> None:
    heads, bias = big(2, 4, 128, 64, requires_grad=True), big(2, 4, 128, 128, requires_grad=True)
    F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).sum().backward()
    assert heads.grad is not None and bias.grad is not None
    assert bias.grad.shape == bias.shape
    assert any(it.device_us[0] > CARD.launch_us for it in dry.timeline.kernels)


@torch_uvm.enabled()
def test_what_follows_from_a_stand_in_is_counted_while_it_lives(dry: DryMode) -> None:
    x, weight = big(1000, 256), big(512, 256)
    (rows,) = (x[:, 0] > 0).nonzero(as_tuple=True)
    (key,) = dry.stand_ins.counts
    wide = F.linear(x[rows], weight)
    found = dry.sizes.at_peak_of(key)
    assert found == sum(500 * it for it in (8, 4 * 256, 4 * 512))
    assert dry.sizes.at_peak_of(None) == found
    gradient = wide.t() @ x[rows]
    assert gradient.shape == weight.shape
    assert dry.sizes.at_peak_of(key) == found
    del wide, gradient
    made = torch.zeros(len(rows), 1200, device="emu")
    assert dry.sizes.at_peak_of(key) == 500 * (8 + 4 * 1200)
    del made
    F.relu(big(1000, 1000))
    assert dry.sizes.at_peak_of(key) == 500 * 8


def test_experts_take_the_memory_of_a_real_run(spawn: Spawn, tmp_path: Path) -> None:
    found = run_dry(tmp_path, ROUTED)
    _, peak = real_run(spawn, [str(tmp_path / "script.py")])
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)


def test_a_plan_says_that_it_is_an_estimate(tmp_path: Path) -> None:
    done = plan(tmp_path, ROUTED, "--card", "t4", "--budgets", "1GiB")
    assert done.returncode == 0, done.stderr
    line = 1 + ROUTED.splitlines().index(
        "            token, place = (chosen == number).nonzero(as_tuple=True)"
    )
    (said,) = [it for it in done.stdout.splitlines() if f"nonzero at train.py:{line}: 2048 rows" in it]
    assert "MiB of the peak" in said
    assert "\nestimate      yes, with" in done.stdout
    assert "\nfits" not in done.stdout and "times as large" not in done.stdout
    plain = ROUTED.replace("(chosen == number).nonzero(as_tuple=True)", "torch.arange(2048), 0")
    plain = plain.replace("place, None", "0, None")
    done = plan(tmp_path, plain, "--card", "t4", "--budgets", "1GiB")
    assert "\nfits          yes, with" in done.stdout and "times as large" in done.stdout
