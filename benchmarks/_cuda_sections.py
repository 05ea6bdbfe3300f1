"""The sections of bench_cuda.py, each a function that returns rows."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C

KIB, MIB, GIB = 1024, 1024**2, 1024**3
Call = Callable[[], object]


@dataclass
class Row:
    """One figure, and its goal if it has one."""

    name: str
    value: float
    unit: str
    goal: str = ""


def size_name(count: int) -> str:
    unit, word = next(it for it in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if count % it[0] == 0)
    return f"{count // unit} {word}"


def scope(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch_uvm.enabled() if on else torch_uvm.disabled()


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch_uvm.memory.empty_cache()


def rate(count: int, seconds: float) -> float:
    return count / seconds / 1e9


def device_seconds(call: Call, before: Call | None = None, repetitions: int = 5) -> float:
    """Median seconds from before the call until the device is idle again. Includes the host's time.

    before: restores the initial state; not timed
    """
    times = []
    for _ in range(repetitions):
        if before is not None:
            before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def host_nanoseconds(call: Call, loops: int) -> float:
    """Host nanoseconds per call. The device may still be busy afterwards."""
    begin = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - begin) / loops


def in_turns(measure: Callable[[bool], float], repetitions: int) -> tuple[list[float], list[float]]:
    """Measures with the switch off and on, alternately, so that drift affects both alike. The time of
    entering the scope is not included. The first turn warms the caches and does not count."""
    figures: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repetitions + 1):
        for on, each in figures.items():
            with scope(on):
                each.append(measure(on))
    return figures[False][1:], figures[True][1:]


def median_ratio(these: list[float], those: list[float]) -> float:
    """The median of the ratios of alternating measurements, so that the machine's speed cancels out."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


def allocation() -> Iterator[Row]:
    """Times torch.empty and its free from Python.

    A core may run at half its speed for seconds while neighbouring cores are busy. Each time is therefore
    that of the fastest slice, and a ratio is the median of the ratios of adjacent slices.
    """
    for size in (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB):

        def empty(size: int = size) -> object:
            return torch.empty(size, dtype=torch.uint8, device="cuda")

        with scope(False):
            loops = max(1, int(2e6 / host_nanoseconds(empty, 200)))  # 2 ms

        def once(on: bool, empty: Call = empty, loops: int = loops) -> float:
            host_nanoseconds(empty, 20)
            return host_nanoseconds(empty, loops)

        off, on = in_turns(once, 51)
        name = f"empty + free, {size_name(size)}"
        yield Row(f"{name}, off", min(off), "ns")
        yield Row(f"{name}, on", min(on), "ns")
        yield Row(f"{name}, on / off", median_ratio(on, off), "", "<= 1.05")


def moves() -> Iterator[Row]:
    """A move to the device of bytes on the host, and a prefetch back."""
    for count, goal in ((32 * MIB, ""), (128 * MIB, ""), (256 * MIB, ">= 46"), (GIB, ">= 49")):
        x = torch_uvm.memory.ones(count, dtype=torch.uint8, device="cpu")

        def to_host(x: torch.Tensor = x) -> None:
            torch_uvm.prefetch(x, "cpu")

        def to_device(x: torch.Tensor = x) -> None:
            torch_uvm.to(x, "cuda")

        up, down = device_seconds(to_device, to_host), device_seconds(to_host, to_device)
        name = size_name(count)
        yield Row(f"move to the device, {name}", rate(count, up), "GB/s", goal)
        yield Row(f"prefetch to the host, {name}", rate(count, down), "GB/s")
        del x, to_host, to_device
        clean()


def plain_copies() -> Iterator[Row]:
    """Plain .cpu() and .cuda() of managed tensors against native ones."""
    for count in (KIB, MIB, 16 * MIB, 256 * MIB):
        with scope(False):
            host = torch.ones(count, dtype=torch.uint8)
            native = torch.ones(count, dtype=torch.uint8, device="cuda")
        with scope(True):
            managed = torch.ones(count, dtype=torch.uint8, device="cuda")

        def down(on: bool, native: torch.Tensor = native, managed: torch.Tensor = managed) -> object:
            return (managed if on else native).cpu()

        def up(on: bool, host: torch.Tensor = host) -> object:
            return host.cuda()

        for direction, copy in ((".cpu()", down), (".cuda()", up)):

            def timed(on: bool, copy: Callable[[bool], object] = copy) -> float:
                return device_seconds(lambda: copy(on), repetitions=1)

            off, on = in_turns(timed, 301 if count <= MIB else 15)
            name = f"plain {direction}, {size_name(count)}"
            yield Row(name, rate(count, statistics.median(on)), "GB/s")
            yield Row(f"{name}, on - off", (statistics.median(on) - statistics.median(off)) * 1e6, "us")
            yield Row(f"{name}, on / off (time)", median_ratio(on, off), "", "<= 1.05")
        del host, native, managed, down, up, copy, timed
        clean()


def copy_out() -> Iterator[Row]:
    """Copies of device-resident managed memory to pinned memory and back, the path of write-backs."""
    x = torch_uvm.memory.ones(GIB, dtype=torch.uint8)
    torch_uvm.advise(x, preferred_location="cuda")
    torch_uvm.prefetch(x)
    with torch_uvm.disabled():
        pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        native = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    for name, to, source, goal in (
        ("copy to pinned memory, 1 GiB", pinned, x, ">= 52"),
        ("copy from pinned memory, 1 GiB", x, pinned, ""),
        ("copy of native memory to pinned, 1 GiB", pinned, native, ""),
    ):

        def copy(to: torch.Tensor = to, source: torch.Tensor = source) -> object:
            return to.copy_(source, non_blocking=True)

        yield Row(name, rate(GIB, device_seconds(copy)), "GB/s", goal)


def first_touch() -> Iterator[Row]:
    """A kernel fills fresh managed memory, populated by torch_uvm's prefetch or by the kernel's faults.

    There is no idle time between runs: after 30 ms without a call the next calls take 0.1 to 0.4 ms longer.
    """
    count = 256 * MIB

    def fill() -> None:
        torch.empty(count, dtype=torch.uint8, device="cuda").fill_(1)

    for populate, name, goal in (("true", "populated", ">= 250"), ("false", "by faults", "")):
        _C.set_option("populate", populate)
        with scope(True):
            device_seconds(fill, clean, 1)  # warms the driver up
            yield Row(f"fresh 256 MiB filled, {name}", rate(count, device_seconds(fill, clean)), "GB/s", goal)
    _C.set_option("populate", "true")


def in_place() -> Iterator[Row]:
    """Kernels on host-resident managed memory, and fused AdamW with its moments left on the host."""
    count = GIB // 4
    x = torch_uvm.memory.ones(count, device="cpu")
    torch_uvm.advise(x, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(x, "cpu")
    with torch_uvm.disabled():
        out = torch.empty(count, device="cuda")
    label = torch_uvm.to(x, "cuda", non_blocking=True)
    torch_uvm.prefetch(x, "cpu")
    read = rate(4 * count, device_seconds(lambda: out.copy_(label)))
    yield Row("read in place on the host, 1 GiB", read, "GB/s")
    written = rate(4 * count, device_seconds(lambda: label.fill_(2)))
    yield Row("written in place on the host, 1 GiB", written, "GB/s")
    count = 128 * MIB  # elements: 512 MiB each of parameter, gradient and two moments
    parameter = torch_uvm.memory.ones(count).requires_grad_()
    parameter.grad = torch_uvm.memory.ones(count)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    with torch_uvm.enabled():
        optimizer.step()
    moments = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
    torch_uvm.advise(moments, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(moments, "cpu")
    each_way = rate(8 * count, device_seconds(optimizer.step))
    yield Row("fused AdamW, moments on the host, each way", each_way, "GB/s", ">= 41")


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 128, 256, 512):
            layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


class Decoder(nn.Module):
    """A GPT of about 100 M parameters: 12 blocks of width 768."""

    def __init__(self, width: int = 768, depth: int = 12, vocabulary: int = 16384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        options: dict[str, Any] = {"batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, F.gelu, **options)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.embedding(tokens), mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(hidden)
        return scores


# Name: (factory, batch, number of timed steps). All fit into the limit.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int]] = {
    "small MLP": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 100)),
        lambda: torch.randn(64, 64, device="cuda"),
        60,
    ),
    "CNN": (Cnn, lambda: torch.randn(64, 3, 128, 128, device="cuda"), 15),
    "GPT, 100 M parameters": (Decoder, lambda: torch.randint(0, 16384, (4, 512), device="cuda"), 9),
}


def make_step(make: Callable[[], nn.Module], batch: Callable[[], torch.Tensor], on: bool) -> Call:
    """Makes a network, its optimizer and its batch. Returns its training step."""
    with scope(on):
        model = make().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        x = batch()

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(x)
        loss = scores.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def training() -> Iterator[Row]:
    """Steps that fit on the device, with the switch on and off, and runtime allocations per steady step."""
    for name, (make, batch, repetitions) in NETWORKS.items():
        steps = {on: make_step(make, batch, on) for on in (False, True)}

        def timed(on: bool, steps: dict[bool, Call] = steps) -> float:
            return device_seconds(steps[on], repetitions=1)

        def calls() -> tuple[int, int]:
            managed: int = _C.memory_stats(None)["num_device_alloc"]
            return torch.cuda.memory_stats()["num_device_alloc"], managed

        in_turns(timed, 2)
        before = calls()
        off, on = (statistics.median(times) for times in in_turns(timed, repetitions))
        made = [after - earlier for after, earlier in zip(calls(), before, strict=True)]
        yield Row(f"step of {name}, off", off * 1e3, "ms")
        yield Row(f"step of {name}, on", on * 1e3, "ms")
        yield Row(f"step of {name}, on / off", on / off, "", "<= 1.02")
        yield Row(f"runtime allocations in its steady steps, {name}", made[0], "", "0")
        yield Row(f"of these, managed, {name}", made[1], "", "0")
        del steps, timed
        clean()


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "allocation": allocation,
    "moves": moves,
    "plain copies": plain_copies,
    "copies out": copy_out,
    "first touch": first_touch,
    "in place": in_place,
    "training": training,
}
