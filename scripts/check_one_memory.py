"""For owners of a machine on which CPU and GPU have one memory (GB10, GH200, Jetson): checks, and rates.

    python scripts/check_one_memory.py [--mebibytes 1024]

It prints a report to paste into an issue. It needs five times the given size of memory, and a file of that
size in the temporary folder. The exit status is 0 if all checks passed, 1 if one failed, and 2 on another
machine.
Times are of the wall clock, so on the emulated accelerator they are this host's and say nothing.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import torch_uvm
from torch_uvm import _C

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
_failed = False


def _status(name: str) -> int:
    """A line of /proc/self/status or /proc/meminfo, in bytes."""
    for file in ("/proc/self/status", "/proc/meminfo"):
        for line in Path(file).read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def check(what: str, holds: Callable[[], object]) -> None:
    """Prints whether `holds()` is true; an exception is a failure, too."""
    global _failed
    try:
        passed = bool(holds())
        why = ""
    except Exception as error:  # the report is to be complete
        passed, why = False, f"  {type(error).__name__}: {error}".split("\n")[0]
        traceback.print_exc()
    _failed = _failed or not passed
    print(f"{'ok  ' if passed else 'FAILED'}  {what}{why}", flush=True)


def rate(what: str, count: int, work: Callable[[], object], times: int = 5) -> None:
    """Prints the rates of the first run and of the fastest one; `count` bytes are read or written by each."""
    seconds = []
    for _ in range(times):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    first, fastest = (count / each / 1e9 for each in (seconds[0], min(seconds)))
    print(f"| {what} | {first:.1f} | {fastest:.1f} |", flush=True)


def mapped(folder: Path, count: int) -> torch.Tensor:
    """A vector 0, 1, 2, ... in a private mapping of a file."""
    file = folder / "weights.pt"
    if not file.exists():
        torch.save(torch.arange(float(count)), file)
    return torch.load(file, mmap=True)  # type: ignore[no-any-return]


def check_moves(count: int) -> None:
    x = torch_uvm.memory.ones(count, device=DEVICE)
    before = torch_uvm.memory.memory_allocated(), _C.managed_bytes()

    def moves() -> bool:
        y = torch_uvm.to(x, "cpu")
        y[0] = 5
        z = torch_uvm.to(y, DEVICE)
        z[1] = 7
        y = torch_uvm.to(z, "cpu")
        same = x.data_ptr() == y.data_ptr() == z.data_ptr()
        return same and y[:3].tolist() == [5, 7, 1] and x[:3].tolist() == [5, 7, 1]

    check("a move shares its bytes, and both processors see the other's writes", moves)
    check("moves add no bytes", lambda: (torch_uvm.memory.memory_allocated(), _C.managed_bytes()) == before)


def check_budget(count: int) -> None:
    def is_accepted() -> bool:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch_uvm.enable(budget=2 * count)  # half of the tensor below
            x = torch.ones(count, device=DEVICE)
            torch_uvm.set_budget("50%")
        said_so = any("one memory" in str(each.message) for each in said)
        return said_so and torch_uvm.get_budget() is None and float(x[-1]) == 1

    check("a budget is accepted, and said to do nothing", is_accepted)
    torch_uvm.disable()
    torch_uvm.set_budget(None)


def check_adoption(folder: Path, count: int) -> None:
    mapped(folder, count)
    gc.collect()
    before, managed = _status("RssAnon"), _C.managed_bytes()
    x = mapped(folder, count)
    y = torch_uvm.to(x, DEVICE, managed=True)
    check("a mapped file is adopted, not copied", lambda: y.data_ptr() == x.data_ptr())
    check("the device reads it", lambda: y[-1].item() == count - 1 and torch.equal(y[:9].cpu(), x[:9]))
    check("it takes no memory of its own", lambda: _status("RssAnon") - before < x.nbytes // 4)
    check("it is no managed allocation", lambda: _C.managed_bytes() - managed < x.nbytes // 4)

    def writes() -> bool:
        y[: count // 2].add_(1)
        torch.accelerator.synchronize()
        return x[0].item() == 1 and mapped(folder, count)[0].item() == 0

    check("the device writes it, and the file does not change", writes)

    def outlives() -> bool:
        other = torch_uvm.to(mapped(folder, count), DEVICE, managed=True)
        total = other[:4096].sum()
        del other
        gc.collect()
        return total.item() == 4095 * 2048

    check("it is released after the device's work", outlives)


def rates(folder: Path, count: int) -> None:
    bytes_of_each = 4 * count
    print("\n| what | GB/s, first | GB/s, fastest |\n| --- | --- | --- |")
    with torch_uvm.disabled():
        plain = torch.ones(count, device=DEVICE)
    rate("the device reads its plain memory", bytes_of_each, plain.sum)
    by_device = torch_uvm.memory.ones(count, device=DEVICE)
    rate("... managed memory that it touched first", bytes_of_each, by_device.sum)
    by_host = torch_uvm.memory.ones(count, device="cpu")
    moved = torch_uvm.to(by_host, DEVICE)
    rate("... managed memory that the host touched first", bytes_of_each, moved.sum)
    adopted = torch_uvm.to(mapped(folder, count), DEVICE, managed=True)
    rate("... an adopted mapping", bytes_of_each, adopted.sum)
    rate("the device writes managed memory", bytes_of_each, lambda: by_device.fill_(2))
    rate("it copies plain memory to managed memory", 2 * bytes_of_each, lambda: by_device.copy_(plain))
    rate(
        "the host reads managed memory that the device wrote",
        bytes_of_each,
        torch_uvm.to(by_device, "cpu").sum,
    )
    rate("... that it touched first", bytes_of_each, by_host.sum)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of each tensor (default 1024)")
    count = parser.parse_args().mebibytes * (1 << 20) // 4
    if _C.backend() == "none" or DEVICE.type == "cpu":
        print("there is no accelerator with managed memory here", file=sys.stderr)
        return 2
    torch.ones(1, device=DEVICE)  # makes the device
    properties = _C.device_properties(0)
    if not properties["one_memory"]:
        print(f"{properties['name']} has its own memory beside the host's: two memories", file=sys.stderr)
        return 2
    emulated = " EMULATED: the rates say nothing" if _C.backend() == "emulated" else ""
    print(f"torch_uvm {torch_uvm.__version__}, torch {torch.__version__}, {platform.platform()}{emulated}")
    for name, value in properties.items():
        print(f"  {name:<28}{value}")
    print(f"  {'MemTotal, MemAvailable':<28}{_status('MemTotal')} {_status('MemAvailable')}")
    print(f"  {'mem_get_info of torch':<28}{torch.accelerator.get_memory_info()}")
    print(f"  {'mem_get_info of torch_uvm':<28}{torch_uvm.mem_get_info()}\n")
    with tempfile.TemporaryDirectory() as folder:
        check_moves(count)
        check_adoption(Path(folder), count)
        check_budget(count)
        rates(Path(folder), count)
    return 1 if _failed else 0


if __name__ == "__main__":
    sys.exit(main())
