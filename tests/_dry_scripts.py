"""Training scripts for the tests of dry runs. None of them mentions torch_uvm."""

from __future__ import annotations

HEAD = """
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
"""

TRANSFORMER = (
    HEAD
    + """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(512, 256)
        self.blocks = nn.ModuleList(Block(256) for _ in range(3))
        self.head = nn.Linear(256, 512)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "--checkpoint" in sys.argv else block(x)
        return self.head(x)


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused="--fused" in sys.argv)
for step in range(6):
    tokens = torch.randint(512, (8, 128)).to(device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""
)

CNN = (
    HEAD
    + """
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.Dropout(0.1),
    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, 10),
)
model = model.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
for step in range(6):
    images, labels = torch.randn(16, 3, 64, 64).to(device), torch.randint(10, (16,), device=device)
    with torch.autocast(device.type, dtype=torch.float16):
        loss = F.cross_entropy(model(images), labels)
    if torch.isnan(loss) or not torch.isfinite(loss):
        raise SystemExit("the loss is not finite")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""
)

CAUSAL_LM = (
    HEAD
    + """
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, vocab_size=1000, use_cache=False,
)
model = AutoModelForCausalLM.from_config(config).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    tokens = torch.randint(1000, (4, 128)).to(device)
    loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

#: 300 GB of parameters, made on the host. It says at its end how much memory the process had.
HUGE = (
    HEAD
    + """
from pathlib import Path

with torch.no_grad():
    model = nn.Sequential(*(nn.Linear(65536, 65536, bias=False) for _ in range(16))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(4096, 65536, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    # Not getrusage: its peak includes the process that this one was forked from.
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
)

AUTOCAST = """
import torch
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda")
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.LazyLinear(10)).to(device)
half, full, ones = torch.bfloat16, torch.float32, torch.ones(4, 4, device=device)
for step in range(3):
    x = torch.randn(4, 3, 64, 64, device=device)
    with torch.autocast("cuda", dtype=half):
        y = model(x)
        if step == 0:
            optimizer = torch.optim.SGD(model.parameters())
        c = model[0](x)
        for result, dtype in (
            (model[1](c), full), (F.layer_norm(c, (62,)), full), (c.softmax(1), full), (c.sum(), full),
            (c.sum(dtype=half), half), (c.exp(), full), (c.double().exp(), torch.float64), (c * 2, half),
            (torch.einsum("ab,bc->ac", ones, ones), half), (torch.addcmul(c, c.float(), c), full),
            (torch.cat([c, c]), half), (torch.cat([c, c.float()]), full), (y, half),
        ):
            assert result.dtype == dtype
        loss = F.cross_entropy(y, torch.zeros(4, dtype=torch.long, device=device))
        assert loss.dtype == full
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

CUDA = """
import threading

import pynvml
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x + torch.ones(1024, device="cuda")

    @staticmethod
    def backward(context, gradient):
        return gradient + torch.zeros(1024, device="cuda")


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.cuda.manual_seed_all(0)
torch.cuda.set_device(0)
model = nn.DataParallel(torch.compile(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()))).cuda()
with torch.device("cuda"):
    head = nn.Linear(1024, 1024).to(torch.device("cuda:0"))
made = []
thread = threading.Thread(target=lambda: made.append(torch.ones(1, device="cuda")))
thread.start()
thread.join()
places = ["cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}, lambda storage, place: storage.cuda("cuda:0")]
assert all(it.is_cuda for it in [*made, *(torch.load("ones.pt", map_location=it) for it in places)])
torch.set_default_device("cuda")
assert torch.ones(1).is_cuda
torch.set_default_tensor_type("torch.FloatTensor")
assert not torch.ones(1).is_cuda
torch.set_default_tensor_type(torch.cuda.FloatTensor)
assert torch.ones(1).is_cuda
torch.set_default_device(None)
assert torch.device("cuda", 0).type == torch.device("cuda").type == "cuda"
assert next(model.parameters()).is_cuda and not torch.ones(1).is_cuda
assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
assert pynvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name()
assert pynvml.nvmlDeviceGetMemoryInfo(handle).total == torch.cuda.mem_get_info()[1]
try:
    torch.cuda.utilization()
except pynvml.NVMLError_NotSupported:
    pynvml.nvmlShutdown()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()])
scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    x = torch.randn(512, 1024).cuda(non_blocking=True) + torch.ones(512, 1024, device=device)
    x = x.type("torch.cuda.HalfTensor").type(torch.cuda.FloatTensor)
    x = x + torch.cuda.FloatTensor(512, 1024).fill_(1)
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x.cpu(), torch.cuda.FloatTensor)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        loss = head(checkpoint(lambda x: Noisy.apply(model(x)), x, use_reentrant=False)).square().mean()
    assert head(model(x)).dtype == torch.float32
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.cuda.synchronize(torch.device("cuda", 0))
    assert torch.cuda.max_memory_allocated() > 0
    torch.cuda.memory_summary()
    letters = torch.randn(16, 4, 8, device=device).log_softmax(-1)
    lengths = torch.tensor([16] * 4), torch.tensor([3] * 4)
    assert F.ctc_loss(letters, torch.ones(4, 3, dtype=torch.int64), *lengths).is_cuda
print("the end")
"""

SPARSE = (
    HEAD
    + """
tables = [nn.Embedding(65536, 64, sparse=True), nn.EmbeddingBag(65536, 64, sparse=True, mode="sum")]
tables, head = nn.ModuleList(tables).to(device), nn.Linear(64, 512).to(device)
optimizers = [torch.optim.SparseAdam(tables.parameters()), torch.optim.SGD(head.parameters())]
for step in range(8):
    rows = torch.randint(65536, (64, 16), device=device)
    loss = head(tables[0](rows).sum(1) + tables[1](rows)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
)

FAKE = (
    HEAD
    + """
from torch._subclasses import FakeTensorMode

with FakeTensorMode():
    fake = torch.empty(1 << 22).detach() + torch.ones(1 << 22)
print(type(fake).__name__, fake.device)
"""
    + TRANSFORMER
)

RANK = (
    HEAD
    + """
import os

from torch import distributed

distributed.init_process_group("nccl")
device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
model = nn.Linear(1024, 1024).to(device)
if "--sharded" in sys.argv:
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh(device.type, (2,))
    fully_shard(model, mesh=mesh)
    nn.init.normal_(model.weight)
else:
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters())
for step in range(6):
    loss = model(torch.randn(512, 1024, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    distributed.all_reduce(loss.detach().clone())
    print(f"{distributed.get_rank()} of {distributed.get_world_size()} on {loss.device}")
"""
)
