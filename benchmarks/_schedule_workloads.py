"""Further workloads: a language model with a large vocabulary, also with an optimizer in backward hooks and
compiled; decoding with a growing cache; a vision transformer, a modern CNN, a graph network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from _residency_workloads import (
    Block,
    Workload,
    checkpointed,
    default_dtype,
    fused_adamw,
    labelled_images,
    momentum,
    plainly,
)
from torch import Tensor, nn
from torch.nn import functional as F


class SteppedInBackward:
    """One fused AdamW for each parameter, which runs in a hook once the parameter's gradient is complete."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._optimizers = {each: torch.optim.AdamW([each], fused=True) for each in parameters}
        for each in self._optimizers:
            each.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._optimizers[parameter].step()
        self._optimizers[parameter].zero_grad(set_to_none=True)

    def step(self) -> None:
        """The hooks have done it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The hooks have done it."""


class LanguageModel(nn.Module):
    def __init__(
        self, depth: int, width: int, heads: int, vocabulary: int, checkpointing: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.run = checkpointed if checkpointing else plainly

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    scores = model(batch[0])[:, :-1].flatten(0, 1)
    return F.cross_entropy(scores, batch[0][:, 1:].flatten())


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
        with default_dtype(torch.bfloat16):
            model: nn.Module = LanguageModel(
                self.depth, self.width, self.heads, self.vocabulary, self.checkpointing
            )
        if self.compiled is not None and device.type == "cuda":
            model.compile(mode=self.compiled)
        tokens = torch.randint(self.vocabulary, (self.sequences, self.length), device=device)
        optimizer = SteppedInBackward if self.in_backward else fused_adamw
        return Workload(model, (tokens,), next_token, optimizer)  # type: ignore[arg-type]


class NoUpdates:
    """In place of an optimizer, where nothing is trained."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """There is nothing to keep."""

    def step(self) -> None:
        """Nothing is updated."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There are no gradients."""


class Decoder(nn.Module):
    """Each call appends the keys and values of one token per sequence to the cache of every layer."""

    def __init__(
        self, depth: int, width: int, heads: int, vocabulary: int, sequences: int, prompt: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.cache = [torch.randn(2, sequences, heads, prompt, width // heads).unbind() for _ in range(depth)]

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            projected = block.qkv(block.norm_attention(x)).chunk(3, -1)
            query, *new = (each.unflatten(-1, (block.heads, -1)).transpose(1, 2) for each in projected)
            old, self.cache[layer] = self.cache[layer], ()  # freed once they are copied
            keys, values = (torch.cat(pair, 2) for pair in zip(old, new, strict=True))
            del old
            self.cache[layer] = (keys, values)
            mixed = F.scaled_dot_product_attention(query, keys, values)
            x = x + block.projection(mixed.transpose(1, 2).flatten(2))
            x = x + block.narrow(F.gelu(block.wide(block.norm_mlp(x))))
        scores: Tensor = self.head(x)
        return scores


@torch.no_grad()
def decode(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """One token of each sequence. The most probable ones are the next call's input."""
    scores: Tensor = model(batch[0])
    batch[0].copy_(scores.argmax(-1))
    return scores.float().mean()


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


class VisionTransformer(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, size: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.places = nn.Parameter(torch.zeros(1, (size // 16) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


def classification(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


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


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        result: Tensor = x + self.narrow(F.gelu(self.wide(inner))).permute(0, 3, 1, 2)
        return result


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
            model = nn.Sequential(*layers, *head)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = labelled_images(self.images, self.size, self.classes, device, torch.bfloat16)
        return Workload(model, batch, classification, momentum)


class GraphNetwork(nn.Module):
    """Sums over neighbours, on the whole graph at once."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer in self.layers:
            nodes = F.relu(layer(torch.zeros_like(nodes).index_add_(0, target, nodes[source])))
        return nodes


def graph_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    scores: Tensor = model(*batch)
    return scores.square().mean()


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
        return Workload(model, (nodes, edges), graph_loss, fused_adamw)


Maker = LanguageModelOf | DecodingOf | VisionTransformerOf | ConvNextOf | GraphOf
_COMPILED = LanguageModelOf(4, 1024, 12, 1024, 16, 32768, checkpointing=False, compiled="default")
_SMALL = LanguageModelOf(1, 32, 2, 128, 4, 512)

WORKLOADS: dict[str, Maker] = {
    "language model": LanguageModelOf(),
    "language model, optimizer in backward": LanguageModelOf(in_backward=True),
    "language model, compiled": _COMPILED,
    "language model, CUDA graphs": replace(_COMPILED, compiled="reduce-overhead"),
    "decoding": DecodingOf(),
    "vision transformer": VisionTransformerOf(),
    "ConvNeXt": ConvNextOf(),
    "graph network": GraphOf(),
}
SMALL: dict[str, Maker] = {
    "language model": _SMALL,
    "language model, optimizer in backward": replace(_SMALL, in_backward=True),
    "language model, compiled": replace(_SMALL, checkpointing=False, compiled="default"),
    "language model, CUDA graphs": replace(_SMALL, checkpointing=False, compiled="reduce-overhead"),
    "decoding": DecodingOf(8, 256, 2, 256, 4, 512),
    "vision transformer": VisionTransformerOf(1, 32, 2, 128, 4, 10),
    "ConvNeXt": ConvNextOf(1, 32, (1, 1), 16, 10),
    "graph network": GraphOf(400, 3000, 64, 2),
}
