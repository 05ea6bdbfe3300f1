"""Models, losses and optimizers of the benchmarks' workloads (_workloads.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]


class Block(nn.Module):
    """A transformer's block."""

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


class LanguageModel(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, vocabulary: int, checkpointing: bool) -> None:
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


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True), nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            shortcut = nn.Conv2d(channels, outer, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.body(x)
        return F.relu(branch + self.shortcut(x))


class ResNet(nn.Module):
    """Uses strided convolutions instead of max pooling, whose backward may add in any order."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
        ]  # fmt: skip
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


# --- losses


def square(model: nn.Module, batch: Batch) -> Tensor:
    scores: Tensor = model(batch[0])
    return scores.float().square().mean()


def square_of_nodes(model: nn.Module, batch: Batch) -> Tensor:
    scores: Tensor = model(*batch)
    return scores.square().mean()


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch[0])[:, :-1].flatten(0, 1)
    return F.cross_entropy(scores, batch[0][:, 1:].flatten())


def next_token_of_transformers(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
    return loss


@torch.no_grad()
def decode(model: nn.Module, batch: Batch) -> Tensor:
    """One token of each sequence. The most probable ones are the next call's input."""
    scores: Tensor = model(batch[0])
    batch[0].copy_(scores.argmax(-1))
    return scores.float().mean()


def classification(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def classification_under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        scores: Tensor = model(images)
    return F.cross_entropy(scores.float(), labels)


# --- optimizers


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class NoUpdates:
    """In place of an optimizer, where nothing is trained."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None: ...
    def step(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class SteppedInBackward(NoUpdates):
    """One fused AdamW for each parameter, which runs in a hook once the parameter's gradient is complete."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._optimizers = {each: torch.optim.AdamW([each], fused=True) for each in parameters}
        for each in self._optimizers:
            each.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._optimizers[parameter].step()
        self._optimizers[parameter].zero_grad(set_to_none=True)
