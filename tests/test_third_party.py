"""Features of the emulated accelerator that other packages need, mostly operators of PyTorch.

docs/compatibility.md lists the programs whose results differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _tables import same_bits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn

import torch_uvm  # noqa: F401  (registers the device)


class TestHistogramsOfIntegers:
    """The CPU has no such kernel, CUDA has one: mixtures of experts count tokens with it."""

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
    @pytest.mark.parametrize("options", [(4, 0, 3), (5, 0, 0), (7, 0, 100), (3, 2, 3)])
    def test_counts(self, dtype: torch.dtype, options: tuple[int, int, int]) -> None:
        x = torch.tensor([0, 3, 3, 1, 2, 3, 0, 50], dtype=dtype)
        expected = torch.histc(x.double(), *options).to(dtype)
        assert same_bits(expected, torch.histc(x.to("emu"), *options))
        out = torch.empty(0, dtype=dtype, device="emu")
        assert torch.histc(x.to("emu"), *options, out=out) is out and same_bits(expected, out)

    def test_of_floats_is_the_cpus(self) -> None:
        x = torch.randn(100)
        out = torch.empty(0, device="emu")
        assert same_bits(torch.histc(x, 9, -1, 1), torch.histc(x.to("emu"), 9, -1, 1))
        assert same_bits(torch.histc(x, 9, -1, 1), torch.histc(x.to("emu"), 9, -1, 1, out=out))

    def test_another_dtype_of_out_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="accepted: the same dtype"):
            torch.histc(torch.ones(3, dtype=torch.int32, device="emu"), out=torch.empty(0, device="emu"))


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
class TestFlexAttention:
    """Without compilation it consists of general operators, but PyTorch checks the device's name."""

    def inputs(self, device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(2, 2, 16, 8).to(device) for _ in range(3)]

    @pytest.mark.parametrize("kind", ["plain", "score_mod", "block_mask"])
    def test_equal_to_the_cpu(self, kind: str) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def attend(device: str) -> torch.Tensor:
            options: dict[str, Any] = {}
            if kind == "score_mod":
                options["score_mod"] = lambda score, b, h, i, j: score + (i - j)
            elif kind == "block_mask":
                options["block_mask"] = create_block_mask(
                    lambda b, h, i, j: i >= j, None, None, 16, 16, device=device
                )
            query, key, value = self.inputs(device)
            result: torch.Tensor = flex_attention(query, key, value, **options)
            return result

        result = attend("emu")
        assert result.device.type == "emu"
        assert same_bits(attend("cpu"), result)

    def test_backward(self) -> None:
        """The CPU has no implementation to compare with."""
        from torch.nn.attention.flex_attention import flex_attention

        gradients = []
        for attend in (flex_attention, nn.functional.scaled_dot_product_attention):
            query, key, value = (x.requires_grad_() for x in self.inputs("emu"))
            attend(query, key, value).square().sum().backward()
            gradients.append([x.grad for x in (query, key, value)])
        for composed, kernel in zip(*gradients, strict=True):
            torch.testing.assert_close(composed.cpu(), kernel.cpu())

    def test_other_devices_are_refused(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        with pytest.raises(ValueError, match="only supported on"):
            query, key, value = (x.to("meta") for x in self.inputs("cpu"))
            flex_attention(query, key, value)


class TestAveraging:
    """torch.optim.swa_utils uses another formula on accelerators by default."""

    @pytest.mark.parametrize(
        "options",
        [{"multi_avg_fn": get_swa_multi_avg_fn()}, {"avg_fn": get_swa_avg_fn()}],
        ids=["lists", "one by one"],
    )
    def test_with_the_same_formula_it_equals_the_cpus(self, options: dict[str, Any]) -> None:
        def average(device: str) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Linear(33, 17)
            averaged = AveragedModel(model.to(device), **options)
            for step in range(5):
                with torch.no_grad():
                    torch.manual_seed(step)
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape).to(device))
                averaged.update_parameters(model)
            return [parameter.detach() for parameter in averaged.parameters()]

        assert all(map(same_bits, average("cpu"), average("emu")))


def test_a_mixture_of_experts_trains_as_on_the_cpu() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=32,
        output_router_logits=True,
    )

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
        losses = []
        for step in range(2):
            torch.manual_seed(step)
            tokens = torch.randint(0, 64, (2, 8)).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    assert all(map(same_bits, train("cpu"), train("emu")))
