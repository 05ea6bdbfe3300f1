"""The workloads of the benchmarks, by name. Equal seeds give equal losses, wherever the memory is.

python benchmarks/_workloads.py NAME [--small]        # trains until it is stopped, for dry runs
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from _networks import (
    Batch,
    ConvNextBlock,
    Decoder,
    GraphNetwork,
    LanguageModel,
    NoUpdates,
    ResNet,
    SteppedInBackward,
    Transformer,
    VisionTransformer,
    classification,
    classification_under_autocast,
    decode,
    fused_adamw,
    momentum,
    next_token,
    next_token_of_transformers,
    square,
    square_of_nodes,
)
from torch import Tensor, nn

SEED = 0


class NotHere(RuntimeError):
    """A workload or column needs a package that is not installed, or is not possible on this device."""


@dataclass
class Workload:
    """A model on its device, and everything that its step needs."""

    model: nn.Module
    batch: Batch
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """An iteration. Returns its loss, without its graph. No backward where nothing is trained."""
        loss = self.loss(self.model, self.batch)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


class Maker(Protocol):
    def make(self, device: torch.device) -> Workload:
        """Makes the workload. Random numbers are the device's own and need no transfer."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A scope in which parameters are made in this dtype. Making them in float32 first would double the
    memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def labelled_images(
    count: int, size: int, classes: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Images of (count, 3, size, size) in channels_last, and a label for each."""
    images = torch.randn(count, 3, size, size, device=device, dtype=dtype)
    labels = torch.randint(classes, (count,), device=device)
    return images.contiguous(memory_format=torch.channels_last), labels


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class TransformerOf:
    """12 blocks of width 2048 are 604 M parameters."""

    sequences: int
    length: int
    checkpointing: bool = False
    depth: int = 12
    width: int = 2048
    heads: int = 16
    dtype: torch.dtype = torch.bfloat16

    def make(self, device: torch.device) -> Workload:
        with default_dtype(self.dtype):
            model = Transformer(self.depth, self.width, self.heads, self.checkpointing)
        x = torch.randn(self.sequences, self.length, self.width, device=device, dtype=self.dtype)
        return Workload(model, (x,), square, fused_adamw)


@dataclass(frozen=True)
class CnnOf:
    """A ResNet-50 of float32 parameters under autocast, images in channels_last."""

    images: int = 64
    size: int = 224
    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    def make(self, device: torch.device) -> Workload:
        model = channels_last(ResNet(self.depths, self.width, self.classes))
        batch = labelled_images(self.images, self.size, self.classes, device, torch.float32)
        return Workload(model, batch, classification_under_autocast, momentum)


@dataclass(frozen=True)
class LoraOf:
    """A Llama of 1.1 G random bfloat16 parameters, frozen, with LoRA of rank 16 on all its projections."""

    sequences: int = 2
    length: int = 1024
    layers: int = 22
    width: int = 2048
    heads: int = 32
    inner: int = 5632
    vocabulary: int = 32000

    def make(self, device: torch.device) -> Workload:
        try:
            peft, transformers = map(importlib.import_module, ("peft", "transformers"))
        except ImportError as error:
            raise NotHere(f"the LoRA fine-tune needs transformers and peft: {error}") from None
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(1, self.heads // 8),
            max_position_embeddings=self.length,
        )
        projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=projections, init_lora_weights=False)
        with default_dtype(torch.bfloat16):
            base = transformers.LlamaForCausalLM(config)
            model: nn.Module = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)
        tokens = torch.randint(self.vocabulary, (self.sequences, self.length), device=device)
        return Workload(model, (tokens,), next_token_of_transformers, fused_adamw)


@dataclass(frozen=True)
class LanguageModelOf:
    """0.55 G parameters of bfloat16 with checkpointing. Its peak is the logits, after the forward.

    ``compiled``: a mode of torch.compile; None: not compiled. In rehearsals, without a GPU, nothing is.
    """

    sequences: int = 8
    length: int = 1024
    depth: int = 12
    width: int = 1536
    heads: int = 16
    vocabulary: int = 65536
    in_backward: bool = False
    checkpointing: bool = True
    compiled: str | None = None

    def make(self, device: torch.device) -> Workload:
        shape = (self.depth, self.width, self.heads, self.vocabulary)
        with default_dtype(torch.bfloat16):
            model: nn.Module = LanguageModel(*shape, self.checkpointing)
        if self.compiled is not None and device.type == "cuda":
            model.compile(mode=self.compiled)
        tokens = torch.randint(self.vocabulary, (self.sequences, self.length), device=device)
        optimizer = SteppedInBackward if self.in_backward else fused_adamw
        return Workload(model, (tokens,), next_token, optimizer)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecodingOf:
    """A decoder of 0.22 G parameters of bfloat16, with a cache of 3.2 GB behind its prompt."""

    sequences: int = 32
    prompt: int = 2048
    depth: int = 12
    width: int = 1024
    heads: int = 16
    vocabulary: int = 32768

    def make(self, device: torch.device) -> Workload:
        with default_dtype(torch.bfloat16):
            model = Decoder(self.depth, self.width, self.heads, self.vocabulary, self.sequences, self.prompt)
        model.requires_grad_(False)
        tokens = torch.randint(self.vocabulary, (self.sequences, 1), device=device)
        return Workload(model, (tokens,), decode, NoUpdates)  # type: ignore[arg-type]


@dataclass(frozen=True)
class VisionTransformerOf:
    """A ViT-L/16 of bfloat16 without checkpointing."""

    images: int = 48
    size: int = 224
    depth: int = 24
    width: int = 1024
    heads: int = 16
    classes: int = 1000

    def make(self, device: torch.device) -> Workload:
        with default_dtype(torch.bfloat16):
            model = VisionTransformer(self.depth, self.width, self.heads, self.size, self.classes)
        batch = labelled_images(self.images, self.size, self.classes, device, torch.bfloat16)
        return Workload(model, batch, classification, fused_adamw)


@dataclass(frozen=True)
class ConvNextOf:
    """A ConvNeXt-B of bfloat16, images in channels_last, SGD with momentum."""

    images: int = 48
    size: int = 224
    depths: tuple[int, ...] = (3, 3, 27, 3)
    width: int = 128
    classes: int = 1000

    def make(self, device: torch.device) -> Workload:
        layers: list[nn.Module] = []
        channels = 3
        with default_dtype(torch.bfloat16):
            for stage, depth in enumerate(self.depths):
                step = 4 if stage == 0 else 2
                layers.append(nn.Conv2d(channels, self.width << stage, step, stride=step))
                channels = self.width << stage
                layers += [ConvNextBlock(channels) for _ in range(depth)]
            head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.classes)]
            model = channels_last(nn.Sequential(*layers, *head))
        batch = labelled_images(self.images, self.size, self.classes, device, torch.bfloat16)
        return Workload(model, batch, classification, momentum)


@dataclass(frozen=True)
class GraphOf:
    nodes: int = 400_000
    edges: int = 3_000_000
    width: int = 128
    layers: int = 3

    def make(self, device: torch.device) -> Workload:
        model = GraphNetwork(self.width, self.layers)
        nodes = torch.randn(self.nodes, self.width, device=device)
        edges = torch.randint(self.nodes, (2, self.edges), device=device)
        return Workload(model, (nodes, edges), square_of_nodes, fused_adamw)


_COMPILED = LanguageModelOf(4, 1024, 12, 1024, 16, 32768, checkpointing=False, compiled="default")
WORKLOADS: dict[str, Maker] = {
    "16k tokens, checkpointing": TransformerOf(8, 2048, checkpointing=True),
    "2k tokens": TransformerOf(2, 1024),
    "2k tokens, checkpointing": TransformerOf(2, 1024, checkpointing=True),
    "16k tokens": TransformerOf(8, 2048),
    "64k tokens, checkpointing": TransformerOf(1, 65536, True, depth=8, width=1024),
    "CNN": CnnOf(),
    "LoRA": LoraOf(),
    "language model": LanguageModelOf(),
    "language model, optimizer in backward": LanguageModelOf(in_backward=True),
    "language model, compiled": _COMPILED,
    "language model, CUDA graphs": replace(_COMPILED, compiled="reduce-overhead"),
    "decoding": DecodingOf(),
    "vision transformer": VisionTransformerOf(),
    "ConvNeXt": ConvNextOf(),
    "graph network": GraphOf(),
}
# The same workloads in a few MiB, for rehearsals without a GPU.
_SMALL = LanguageModelOf(1, 32, 2, 128, 4, 512)
SMALL: dict[str, Maker] = {
    "16k tokens, checkpointing": TransformerOf(2, 64, True, depth=3, width=256, heads=4),
    "2k tokens": TransformerOf(1, 64, depth=3, width=256, heads=4),
    "2k tokens, checkpointing": TransformerOf(1, 64, True, depth=3, width=256, heads=4),
    "16k tokens": TransformerOf(2, 64, depth=3, width=256, heads=4),
    "64k tokens, checkpointing": TransformerOf(1, 256, True, depth=3, width=256, heads=4),
    "CNN": CnnOf(2, 32, (1, 1), 16, 10),
    "LoRA": LoraOf(1, 32, 2, 128, 8, 256, 256),
    "language model": _SMALL,
    "language model, optimizer in backward": replace(_SMALL, in_backward=True),
    "language model, compiled": replace(_SMALL, checkpointing=False, compiled="default"),
    "language model, CUDA graphs": replace(_SMALL, checkpointing=False, compiled="reduce-overhead"),
    "decoding": DecodingOf(8, 256, 2, 256, 4, 512),
    "vision transformer": VisionTransformerOf(1, 32, 2, 128, 4, 10),
    "ConvNeXt": ConvNextOf(1, 32, (1, 1), 16, 10),
    "graph network": GraphOf(400, 3000, 64, 2),
}


def make(name: str, device: torch.device, small: bool = False) -> Workload:
    """Makes a seeded workload on the device.

    Raises:
        NotHere: a package is missing.
    """
    torch.manual_seed(SEED)
    with torch.device(device):
        return (SMALL if small else WORKLOADS)[name].make(device)


def main() -> None:
    import torch_uvm  # other columns run without it

    device = torch.accelerator.current_accelerator()
    assert device is not None
    made = make(sys.argv[1], device, "--small" in sys.argv)
    updates = made.optimizer(made.trained())
    while True:
        made.step(updates)
        torch.accelerator.synchronize()
        if not made.trained():
            torch_uvm.step()


if __name__ == "__main__":
    main()
