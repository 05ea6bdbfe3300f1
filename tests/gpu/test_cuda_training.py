"""Networks train on managed memory as on native memory: equal to the last bit wherever two native runs
are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _cuda import is_managed_by_cuda
from _models import Convolutional, Gpt, images, tokens
from torch import nn
from torch.nn import functional as F

import torch_uvm

Step = Callable[[], torch.Tensor]
STEPS = 6


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def hugging_face(kind: str) -> nn.Module:
    """A causal LM with random weights, made from a configuration. Nothing is downloaded."""
    transformers: Any = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def classify(make: Callable[[], nn.Module], data: Callable[[], torch.Tensor]) -> tuple[nn.Module, Step]:
    model = make().cuda()

    def step() -> torch.Tensor:
        scores = model(data().cuda())
        return F.cross_entropy(scores, torch.randint(0, 10, (len(scores),)).cuda())

    return model, step


def language(kind: str) -> tuple[nn.Module, Step]:
    model = hugging_face(kind).cuda()

    def step() -> torch.Tensor:
        ids = torch.randint(0, 128, (4, 32)).cuda()
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    return model, step


SCRIPTS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "mlp": lambda: classify(Mlp, lambda: torch.randn(32, 64)),
    "cnn": lambda: classify(Convolutional, images),
    "gpt": lambda: classify(Gpt, tokens),
    "hugging face gpt2": lambda: language("gpt2"),
    "hugging face llama": lambda: language("llama"),
}


def train(
    make: Callable[[], tuple[nn.Module, Step]],
    scope_of_step: Callable[[int], contextlib.AbstractContextManager[Any]],
    inspect: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
    autocast: bool = False,
) -> list[float]:
    torch.manual_seed(3)
    with scope_of_step(0):
        model, step = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        with scope_of_step(number):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = step()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    if inspect is not None:
        inspect(model, optimizer)
    return losses


def off(_: int) -> Any:
    return torch_uvm.disabled()


def on(_: int) -> Any:
    return torch_uvm.enabled()


def all_managed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert is_managed_by_cuda(parameter)
        if parameter.grad is not None:
            assert is_managed_by_cuda(parameter.grad), "gradients of a backward thread are native"
    for state in optimizer.state.values():
        assert is_managed_by_cuda(state["exp_avg"])


def check_equal(name: str, managed: Callable[[], list[float]], native: Callable[[], list[float]]) -> None:
    first, second = native(), native()
    found = managed()
    assert all(torch.isfinite(torch.tensor(found)))
    if first == second:
        assert found == first
    else:  # the network is not deterministic on this GPU; the differences are rounding errors
        torch.testing.assert_close(torch.tensor(found), torch.tensor(first), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_switch_on_equals_off(name: str) -> None:
    make = SCRIPTS[name]
    check_equal(name, lambda: train(make, on, all_managed), lambda: train(make, off))


def test_plain_runs_are_equal() -> None:
    assert train(SCRIPTS["mlp"], off) == train(SCRIPTS["mlp"], off)


@pytest.mark.parametrize("name", ["gpt", "hugging face gpt2"])
def test_autocast(name: str) -> None:
    make = SCRIPTS[name]
    check_equal(
        name, lambda: train(make, on, all_managed, autocast=True), lambda: train(make, off, autocast=True)
    )


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_switched_in_the_middle_of_training(name: str) -> None:
    def alternate(number: int) -> Any:
        return torch_uvm.enabled() if number % 2 else torch_uvm.disabled()

    make = SCRIPTS[name]
    check_equal(name, lambda: train(make, alternate), lambda: train(make, off))


def test_a_model_that_moves_to_the_cpu_and_back() -> None:
    """The move renames the device only: the bytes are shared, and the optimizer continues."""

    def moving() -> list[float]:
        torch.manual_seed(3)
        with torch_uvm.enabled():
            model, step = SCRIPTS["mlp"]()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses = []
            for number in range(STEPS):
                torch.manual_seed(number)
                loss = step()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                addresses = [p.data_ptr() for p in model.parameters()]
                torch_uvm.to(model, "cpu")
                assert all(p.device.type == "cpu" for p in model.parameters())
                torch_uvm.to(model, "cuda")
                assert [p.data_ptr() for p in model.parameters()] == addresses
        return losses

    check_equal("mlp", moving, lambda: train(SCRIPTS["mlp"], off))
