"""Rates of moves, prefetches, copies, first touches and in-place kernels on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from _cuda_bare import seconds_to_fill
from _cuda_rows import GIB, KIB, MIB, Row, clean, give_back, rate, scope, size_name
from _cuda_timing import Call, device_seconds, host_nanoseconds, in_turns, interleaved, median_ratio

import torch_uvm
from torch_uvm import _C

_RATES = {32 * MIB: "40 to 42", 128 * MIB: "47", 256 * MIB: "", GIB: "49.8"}
_GOALS = {256 * MIB: ">= 46", GIB: ">= 49"}


def moves() -> list[Row]:
    """A move to the device of bytes on the host, and a prefetch back."""
    rows = []
    for count in (32 * MIB, 128 * MIB, 256 * MIB, GIB):
        x = torch_uvm.ones(count, dtype=torch.uint8, device="cpu")

        def to_host(x: torch.Tensor = x) -> None:
            torch_uvm.prefetch(x, "cpu")

        def to_device(x: torch.Tensor = x) -> None:
            torch_uvm.to(x, "cuda")

        up = device_seconds(to_device, to_host)
        down = device_seconds(to_host, to_device)
        name = size_name(count)
        rows += [
            Row(f"move to the device, {name}", rate(count, up), "GB/s", _GOALS.get(count, ""), _RATES[count]),
            Row(f"prefetch to the host, {name}", rate(count, down), "GB/s", predicted="9.6 to 10.7"),
        ]
        del x, to_host, to_device
        clean()
    return rows


def small_moves() -> list[Row]:
    """Cost of a call that has nothing to move."""
    x = torch_uvm.ones(1024)
    y = torch_uvm.to(x, "cpu")
    found = interleaved(
        {
            "move to the CPU, resident, non_blocking": lambda: torch_uvm.to(x, "cpu", non_blocking=True),
            "move to the device, resident": lambda: torch_uvm.to(y, "cuda"),
            "x.detach(), for comparison": lambda: x.detach(),
        },
        repetitions=15,
        slice_ms=4,
    )
    return [Row(name, value, "ns") for name, value in found.items()]


def plain_copies() -> list[Row]:
    """Plain .cpu() and .cuda() of managed tensors against native ones."""
    rows = []
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

            off, on = in_turns(timed, scope, 301 if count <= MIB else 15)
            name = f"plain {direction}, {size_name(count)}"
            rows += [
                Row(name, rate(count, statistics.median(on)), "GB/s"),
                Row(f"{name}, on - off", (statistics.median(on) - statistics.median(off)) * 1e6, "us"),
                Row(f"{name}, on / off (time)", median_ratio(on, off), "", "<= 1.05"),
            ]
        del host, native, managed, down, up, copy, timed
        clean()
    return rows


def copy_out() -> list[Row]:
    """Copies of device-resident managed memory to pinned memory and back, the path of write-backs."""
    count = GIB
    x = torch_uvm.ones(count, dtype=torch.uint8)
    torch_uvm.advise(x, preferred_location="cuda")
    torch_uvm.prefetch(x)
    with torch_uvm.disabled():
        pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        native = torch.ones(count, dtype=torch.uint8, device="cuda")
    out = device_seconds(lambda: pinned.copy_(x, non_blocking=True))
    back = device_seconds(lambda: x.copy_(pinned, non_blocking=True))
    native_out = device_seconds(lambda: pinned.copy_(native, non_blocking=True))
    called = device_seconds_of_call(lambda: pinned.copy_(x, non_blocking=True))
    return [
        Row("copy to pinned memory, 1 GiB", rate(count, out), "GB/s", ">= 52", "52.6"),
        Row("copy from pinned memory, 1 GiB", rate(count, back), "GB/s", predicted="51.3"),
        Row("copy of native memory to pinned, 1 GiB", rate(count, native_out), "GB/s", predicted="55.3"),
        Row("the call of the copy to pinned, 1 GiB", called * 1e6, "us", predicted="asynchronous"),
    ]


def device_seconds_of_call(call: Call) -> float:
    """Seconds of the call itself on an idle device, without the work that it queues."""
    torch.cuda.synchronize()
    nanoseconds = []
    for _ in range(5):
        nanoseconds.append(host_nanoseconds(call, 1))
        torch.cuda.synchronize()
    return sorted(nanoseconds)[2] * 1e-9


def first_touch() -> list[Row]:
    """A kernel fills fresh managed memory, populated by torch_uvm's prefetch or by the kernel's faults.

    Alternates with the same work by bare CUDA calls, because a prefetch keeps a core busy and the core may
    be slow. There is no idle time between runs: after 30 ms without a call the next calls take 0.1 to 0.4 ms
    longer, bare calls included.
    """
    clean()
    count = 256 * MIB

    def fill() -> None:
        torch.empty(count, dtype=torch.uint8, device="cuda").fill_(1)

    def ours(populate: str) -> float:
        give_back()
        _C.set_option("populate", populate)
        with scope(True):
            return device_seconds(fill, repetitions=1)

    def bare() -> float:
        give_back()
        return seconds_to_fill(count)

    in_order = [(ours("true"), bare()) for _ in range(16)][1:]  # the first run warms the driver up
    seconds = {
        "populated": [ours_ for ours_, _ in in_order],
        "by bare CUDA calls": [bare_ for _, bare_ in in_order],
        "by faults": [ours("false") for _ in range(5)],
    }
    _C.set_option("populate", "true")
    goals = {"populated": (">= 250", "280"), "by faults": ("", "10.6")}
    rows = [
        Row(
            f"fresh 256 MiB filled, {word}",
            rate(count, statistics.median(each)),
            "GB/s",
            *goals.get(word, ()),
        )
        for word, each in seconds.items()
    ]
    ratio = median_ratio(seconds["populated"], seconds["by bare CUDA calls"])
    rows.append(Row("populated / by bare CUDA calls (time)", ratio, ""))
    x = torch_uvm.empty(count, dtype=torch.uint8)
    again = device_seconds(lambda: x.fill_(1))
    rows.append(Row("filled again", rate(count, again), "GB/s", predicted="> 1500"))
    return rows


def in_place() -> list[Row]:
    """Kernels on host-resident managed memory."""
    count = GIB // 4
    x = torch_uvm.ones(count, device="cpu")
    torch_uvm.advise(x, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(x, "cpu")
    with torch_uvm.disabled():
        out = torch.empty(count, device="cuda")
    label = torch_uvm.to(x, "cuda", non_blocking=True)
    torch_uvm.prefetch(x, "cpu")
    read = device_seconds(lambda: out.copy_(label))
    write = device_seconds(lambda: label.fill_(2))
    return [
        Row("read in place on the host, 1 GiB", rate(4 * count, read), "GB/s", predicted="51.2"),
        Row("written in place on the host, 1 GiB", rate(4 * count, write), "GB/s", predicted="52.5"),
        *adamw_on_the_host(),
    ]


def adamw_on_the_host() -> list[Row]:
    """Fused AdamW with its moments left on the host."""
    count = 128 * MIB  # elements: 512 MiB each of parameter, gradient and two moments
    parameter = torch_uvm.ones(count).requires_grad_()
    parameter.grad = torch_uvm.ones(count)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    with torch_uvm.enabled():
        optimizer.step()
    moments = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
    torch_uvm.advise(moments, preferred_location="cpu", accessed_by="cuda")
    torch_uvm.prefetch(moments, "cpu")
    seconds = device_seconds(optimizer.step)
    each_way = rate(8 * count, seconds)
    return [Row("fused AdamW, moments on the host, each way", each_way, "GB/s", ">= 41", "41")]
