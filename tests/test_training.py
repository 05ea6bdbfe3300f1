"""Training on the emulated accelerator equals training on the CPU, to the last bit; recurrent layers but for
roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _models import Convolutional, Encoder, Gpt, Recurrent, images, sequences, tokens, train, vectors
from torch import nn

import torch_uvm

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "cnn": (Convolutional, images),
    "lstm": (lambda: Recurrent("LSTM"), sequences),
    "lstm-bidirectional-dropout": (lambda: Recurrent("LSTM", bidirectional=True, dropout=0.2), sequences),
    "lstm-projected": (lambda: Recurrent("LSTM", proj_size=8), sequences),
    "gru": (lambda: Recurrent("GRU"), sequences),
    "rnn": (lambda: Recurrent("RNN"), sequences),
    "gpt": (Gpt, tokens),
    "gpt-checkpointed": (lambda: Gpt(checkpointed=True), tokens),
    "transformer-encoder": (Encoder, vectors),
}


@pytest.fixture(params=MODELS, name="case")
def make_case(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    make_model, make_input = MODELS[request.param]
    torch.manual_seed(3)
    return make_model(), make_input


@pytest.fixture
def gpt() -> Gpt:
    torch.manual_seed(3)
    return Gpt()


class TestModels:
    def test_cpu_equals_itself(self, case: tuple[nn.Module, Callable[[], torch.Tensor]]) -> None:
        """The reference must be repeatable, or the tests below would prove nothing."""
        assert train(*case, "cpu") == train(*case, "cpu")

    @pytest.mark.parametrize("managed", [False, True], ids=["plain", "managed"])
    def test_equal_to_cpu(self, case: tuple[nn.Module, Callable[[], torch.Tensor]], managed: bool) -> None:
        with torch_uvm.enabled() if managed else torch_uvm.disabled():
            run = train(*case, "emu")
        expected = train(*case, "cpu")
        assert run.is_close(expected) if isinstance(case[0], Recurrent) else run == expected

    def test_autocast_equal_to_cpu(self, case: tuple[nn.Module, Callable[[], torch.Tensor]]) -> None:
        try:
            expected = train(*case, "cpu", autocast=torch.bfloat16)
        except RuntimeError as error:
            if "primitive descriptor" not in str(error):
                raise
            pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
        run = train(*case, "emu", autocast=torch.bfloat16)
        assert run.is_close(expected, 2e-2) if isinstance(case[0], Recurrent) else run == expected

    def test_a_different_run_is_noticed(self, gpt: Gpt) -> None:
        assert train(gpt, tokens, "emu", options={"lr": 0.0500001}) != train(gpt, tokens, "cpu")


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {}),
]


class TestOptimizers:
    @pytest.mark.parametrize("how", ["neither", "foreach", "fused", "default"])
    @pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
    def test_equal_to_cpu(
        self, gpt: Gpt, optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, Any], how: str
    ) -> None:
        chosen = {
            "neither": {"foreach": False},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "default": {},
        }[how]
        if how == "fused" and optimizer is torch.optim.RMSprop:
            chosen = {"foreach": True, "centered": True}  # has no fused form
        run = train(gpt, tokens, "emu", optimizer=optimizer, options={**options, **chosen})
        # By default, optimizers use foreach on accelerators and a loop on the CPU. The comparison uses
        # foreach on both.
        reference = {"foreach": True} if how == "default" else chosen
        assert run == train(gpt, tokens, "cpu", optimizer=optimizer, options={**options, **reference})


class TestLoops:
    def test_grad_scaler(self, gpt: Gpt) -> None:
        options: dict[str, Any] = {"autocast": torch.float16, "scaled": True, "clip": 0.5}
        assert train(gpt, tokens, "emu", **options) == train(gpt, tokens, "cpu", **options)

    def test_gradient_accumulation(self, gpt: Gpt) -> None:
        assert train(gpt, tokens, "emu", accumulate=3) == train(gpt, tokens, "cpu", accumulate=3)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_with_dropout(self, reentrant: bool) -> None:
        """The recomputed forward draws the same numbers: the generator's state is restored."""

        def gradients(device: str) -> list[torch.Tensor]:
            torch.manual_seed(5)
            block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
            x = torch.randn(4, 16)
            block, x = block.to(device), x.to(device).requires_grad_()
            torch.manual_seed(6)
            checkpointed = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            checkpointed.square().sum().backward()
            return [p.grad.cpu() for p in block.parameters() if p.grad is not None]

        assert all(map(torch.equal, gradients("emu"), gradients("cpu")))

    def test_gradients_of_backward_threads_are_managed(self, gpt: Gpt) -> None:
        model = gpt.to("emu")
        with torch_uvm.enabled():
            loss = model(tokens().to("emu")).square().sum()
            loss.backward()
        assert all(p.grad is not None and torch_uvm.is_managed(p.grad) for p in model.parameters())
        assert not any(torch_uvm.is_managed(p) for p in model.parameters())

    def test_module_to_keeps_ties(self, gpt: Gpt) -> None:
        model = gpt.to("emu")
        assert model.head.weight is model.tokens.weight


class TestRecurrentLayers:
    def test_packed_sequences(self) -> None:
        torch.manual_seed(0)
        layer = nn.LSTM(12, 16)
        batch = nn.utils.rnn.pad_sequence([torch.randn(n, 12) for n in (5, 3, 2)])
        results = []
        for device in ("cpu", "emu"):
            packed = nn.utils.rnn.pack_padded_sequence(batch.to(device), torch.tensor([5, 3, 2]))
            output, _ = layer.to(device)(packed)
            assert output.data.device.type == device
            assert output.batch_sizes.device.type == "cpu"
            results.append(nn.utils.rnn.pad_packed_sequence(output)[0].cpu())
        torch.testing.assert_close(*results)

    def test_inference_mode(self) -> None:
        layer, x = nn.GRU(12, 16), sequences()
        with torch.inference_mode():
            torch.testing.assert_close(layer(x)[0], layer.to("emu")(x.to("emu"))[0].cpu())

    def test_write_to_a_saved_input_is_noticed(self) -> None:
        layer = nn.LSTM(12, 16).to("emu")
        x = sequences().to("emu")
        output, _ = layer(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    def test_second_backward_needs_retain_graph(self) -> None:
        layer, x = nn.LSTM(12, 16).to("emu"), sequences().to("emu").requires_grad_()
        output = layer(x)[0].sum()
        output.backward(retain_graph=True)
        assert x.grad is not None
        once = x.grad.clone()
        output.backward()
        assert torch.equal(x.grad, once * 2)
        with pytest.raises(RuntimeError, match="second time"):
            output.backward()
