"""Programs that train networks: convolutions, GANs, pruned, compiled, traced and scripted models."""

from __future__ import annotations

import copy
import io

import torch
from _programs import Results, program, step
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(inside, outside, 1, stride)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.one(x)), inplace=True)
        return F.relu(self.norms[1](self.two(inner)) + self.around(x))


@program
def resnet_channels_last(device: str) -> Results:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)
    losses = []
    for _ in range(3):
        images = torch.randn(16, 3, 32, 32).to(device, memory_format=torch.channels_last)
        target = torch.randint(0, 10, (16,)).to(device)
        losses.append(step(optimizer, F.cross_entropy(model(images), target)))
    model.eval()
    return [*losses, model(images), *model.state_dict().values()]


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.SiLU()
        )
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.LeakyReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.out = nn.Sequential(
            nn.Conv2d(32, 16, 3, padding=1, padding_mode="reflect"),
            nn.PReLU(),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(16, 1, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        output: torch.Tensor = self.out(torch.cat([high, self.up(self.low(high))], 1))
        return output


@program
def unet(device: str) -> Results:
    model = Unet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    losses = []
    for _ in range(2):
        x = torch.randn(4, 1, 48, 48).to(device)
        target = F.interpolate((x > 0).float(), scale_factor=2)
        losses.append(step(optimizer, F.binary_cross_entropy_with_logits(model(x), target)))
    return [*losses, *model.parameters()]


@program
def gan_of_two_optimizers(device: str) -> Results:
    generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 256)).to(device)
    critic = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(256, 64)), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    ).to(device)
    ours = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9), foreach=True)
    theirs = torch.optim.RMSprop(critic.parameters(), 1e-3, foreach=True)
    losses = []
    for _ in range(3):
        real, noise = torch.randn(32, 256).to(device), torch.randn(32, 16).to(device)
        fake = generator(noise)
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        losses.append(step(theirs, loss))
        losses.append(step(ours, F.softplus(-critic(fake)).mean()))
    return [*losses, *generator.state_dict().values(), *critic.state_dict().values()]


@program
def moving_averages(device: str) -> Results:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
    mine = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.NAdam(model.parameters(), foreach=True)
    for _ in range(3):
        step(optimizer, model(torch.randn(8, 64).to(device)).square().mean())
        with torch.no_grad():
            torch._foreach_lerp_(list(mine.parameters()), list(model.parameters()), 0.1)
        averaged.update_parameters(model)
    return [*mine.parameters(), *averaged.parameters()]


@program
def parametrizations(device: str) -> Results:
    made = nn.utils.parametrizations
    layers = [made.weight_norm(nn.Linear(6, 6)), made.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 6)]
    model = nn.Sequential(*layers).to(device)
    prune.l1_unstructured(model[2], "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    losses = [step(optimizer, model(torch.randn(4, 6).to(device)).square().sum()) for _ in range(3)]
    return [*losses, *model.state_dict().values()]


@program
def speech_with_ctc(device: str) -> Results:
    words, bag = nn.Embedding(50, 16, padding_idx=0, max_norm=1.0), nn.EmbeddingBag(50, 16)
    layer, head = nn.Linear(16, 32), nn.Linear(32, 20)
    model = nn.ModuleList([words, bag, layer, head]).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), foreach=True)
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 50, (30, 4)).to(device)
        scores = head(layer(words(tokens) + bag(tokens.T.contiguous())).tanh()).log_softmax(-1)
        target = torch.randint(1, 20, (4, 10)).to(device)
        loss = F.ctc_loss(scores, target, torch.full((4,), 30), torch.full((4,), 10))
        losses.append(step(optimizer, loss))
    return [*losses, *model.parameters()]


@program
def compiled(device: str) -> Results:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    losses = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        fast = torch.compile(model, backend=backend)
        losses += [step(optimizer, fast(torch.randn(3, 8).to(device)).square().sum()) for _ in range(2)]
    return [*losses, *model.parameters()]


@program
def traced_and_scripted(device: str) -> Results:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3), nn.Flatten()).to(device)
    x = torch.randn(2, 1, 8, 8).to(device)
    outputs = []
    traced = torch.jit.trace(model, x)
    for run in (traced, torch.jit.script(model)):
        for _ in range(3):
            outputs.append(run(x))
            outputs[-1].square().sum().backward()
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return [*outputs, torch.jit.load(file, map_location=device)(x), *[p.grad for p in model.parameters()]]
