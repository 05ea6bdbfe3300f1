"""Workloads of the residency benchmarks. Equal seeds give equal losses, wherever the memory is."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SEED = 0


class NotHere(RuntimeError):
    """A workload or column needs a package that is not installed, or is not possible on this device."""


@dataclass
class Workload:
    """A model on its device, and everything that its step needs."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
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


# --- the transformer


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        mlp: Tensor = self.narrow(F.gelu(self.wide(self.norm_mlp(x))))
        return x + mlp


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(block, x, use_reentrant=False)
    return result


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = block(x)
    return result


class Transformer(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, checkpointing: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.run = checkpointed if checkpointing else plainly

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


def square(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    scores: Tensor = model(batch[0])
    return scores.float().square().mean()


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


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


# --- the CNN


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.body(x)
        return F.relu(branch + self.shortcut(x))


class ResNet(nn.Module):
    """Uses strided convolutions instead of max pooling, whose backward may add in any order."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
        ]
        channels = width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for number in range(depth):
                layers.append(Bottleneck(channels, inner, 2 if stage and number == 0 else 1))
                channels = 4 * inner
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(x).mean((2, 3)))
        return scores


def classification(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        scores: Tensor = model(images)
    return F.cross_entropy(scores.float(), labels)


def labelled_images(
    count: int, size: int, classes: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Images of (count, 3, size, size) in channels_last, and a label for each."""
    images = torch.randn(count, 3, size, size, device=device, dtype=dtype)
    labels = torch.randint(classes, (count,), device=device)
    return images.contiguous(memory_format=torch.channels_last), labels


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class CnnOf:
    """A ResNet-50 of float32 parameters under autocast, images in channels_last."""

    images: int = 64
    size: int = 224
    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    def make(self, device: torch.device) -> Workload:
        model = ResNet(self.depths, self.width, self.classes)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = labelled_images(self.images, self.size, self.classes, device, torch.float32)
        return Workload(model, batch, classification, momentum)


# --- a causal language model with a frozen base


def next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
    return loss


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
        return Workload(model, (tokens,), next_token, fused_adamw)


Maker = TransformerOf | CnnOf | LoraOf

WORKLOADS: dict[str, Maker] = {
    "16k tokens, checkpointing": TransformerOf(8, 2048, checkpointing=True),
    "2k tokens": TransformerOf(2, 1024),
    "2k tokens, checkpointing": TransformerOf(2, 1024, checkpointing=True),
    "16k tokens": TransformerOf(8, 2048),
    "64k tokens, checkpointing": TransformerOf(1, 65536, True, depth=8, width=1024),
    "CNN": CnnOf(),
    "LoRA": LoraOf(),
}
# The same workloads in a few MiB, for rehearsals without a GPU.
SMALL: dict[str, Maker] = {
    "16k tokens, checkpointing": TransformerOf(2, 64, True, depth=3, width=256, heads=4),
    "2k tokens": TransformerOf(1, 64, depth=3, width=256, heads=4),
    "2k tokens, checkpointing": TransformerOf(1, 64, True, depth=3, width=256, heads=4),
    "16k tokens": TransformerOf(2, 64, depth=3, width=256, heads=4),
    "64k tokens, checkpointing": TransformerOf(1, 256, True, depth=3, width=256, heads=4),
    "CNN": CnnOf(2, 32, (1, 1), 16, 10),
    "LoRA": LoraOf(1, 32, 2, 128, 8, 256, 256),
}


def larger(name: str, times: int, device: torch.device, small: bool = False) -> tuple[Tensor, ...]:
    """A transformer's batch of `times` times the usual size."""
    maker = (SMALL if small else WORKLOADS)[name]
    assert isinstance(maker, TransformerOf)
    shape = (times * maker.sequences, maker.length, maker.width)
    torch.manual_seed(SEED + 1)
    return (torch.randn(shape, device=device, dtype=maker.dtype),)
