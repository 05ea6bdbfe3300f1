"""Keeps programs on a GPU from allocating more managed memory than the card has free.

Managed memory beyond a card's free memory can hang the GPU for all users of the machine. The rule: managed
memory takes at most what is free on a card less a margin of 6 GiB, under a limit that is set before the first
allocation. Every program that allocates managed memory on a GPU (tests/gpu, benchmarks) follows it:

    check_room(limit)         # or limit = room()
    guard = Guard(limit)
    guard.hold()              # sets the limit; from here on no call in this process can raise it
    ... allocate ...
    guard.check()             # raises if the limit was exceeded or lifted

Other processes start with `environment(limit)` added to their environment. A process that watches another
one reads the card's free memory meanwhile, and calls `check_afterwards`.

A balloon makes a card small: plain device memory that leaves few bytes free. Beside it, the limit is half of
what is left:

    held = balloon(left, device)
    guard = Guard(room_beside_a_balloon())
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_uvm import _C

MIB = 1024**2
GIB = 1024**3
MARGIN = 6 * GIB  # of a card's free memory, for CUDA contexts, libraries and PyTorch's own allocator
LEAST_FREE = GIB  # what has to stay free meanwhile: below that the driver may begin to evict

# Text that a program must not contain, because it removes the limit regardless of the environment.
_LIMIT = r"(?<!host_)limit"  # of managed memory; host_limit is that of pinned memory
_UNLIMITED = re.compile(
    rf"""set_limit\(\s*(?:limit\s*=\s*)?["']?\s*None|{_LIMIT}\s*:\s*none|{_LIMIT}\s*=\s*["']\s*none"""
    r"""|--limit["',=\s]+none""",
    re.IGNORECASE,
)
_SETS_LIMIT = re.compile(rf"""(?:set_limit\(\s*|{_LIMIT}\s*[:=]\s*)["']?([0-9][0-9_.]*\s*(?:[KMGT]i?B|B)?)""")


class Refused(RuntimeError):
    """The limit would not be safe, or a call tried to raise it."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def free_by_nvml() -> list[int] | None:
    """Bytes free on every card of the machine, visible to this process or not; None without a driver.
    Creates no CUDA context."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count, handle, memory = ctypes.c_uint(), ctypes.c_void_p(), _Memory()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    free = []
    for card in range(count.value):
        if library.nvmlDeviceGetHandleByIndex_v2(
            card, ctypes.byref(handle)
        ) or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        free.append(int(memory.free))
    return free


def free_by_runtime() -> list[int]:
    """Bytes free on every device that this process sees, by the CUDA runtime. Allocates nothing managed."""
    return [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]


Reader = Callable[[], Sequence[int] | None]
READERS: Mapping[str, Reader] = {"NVML": free_by_nvml, "cudaMemGetInfo": free_by_runtime}


def _read(readers: Mapping[str, Reader]) -> dict[str, list[int]]:
    """The free bytes of each card, by reader.

    Raises:
        Refused: no reader reports a card; or managed memory was allocated, so that a card's free memory does
            not tell what this process may allocate.
    """
    if _C.in_use() and _C.peak_managed_bytes() > 0:
        raise Refused("managed memory was allocated before the free memory was checked")
    found = {name: read() for name, read in readers.items()}
    readings = {name: list(free) for name, free in found.items() if free is not None}
    if not any(readings.values()):
        raise Refused("no reader reports the free memory of any card")
    return readings


def check_room(limit: int, readers: Mapping[str, Reader] = READERS) -> dict[str, list[int]]:
    """Returns the free bytes of each card, by reader.

    Raises:
        Refused: a reader reports a card with less than the limit and MARGIN free, or none reports a card.
    """
    readings = _read(readers)
    for name, free in readings.items():
        for card, each in enumerate(free):
            if limit > each - MARGIN:
                raise Refused(
                    f"card {card} has {each / GIB:.1f} GiB free ({name}); a limit of {limit / GIB:.2f} GiB "
                    f"of managed memory takes at least {(limit + MARGIN) / GIB:.1f} GiB"
                )
    return readings


def room(readers: Mapping[str, Reader] = READERS) -> int:
    """The highest limit that `check_room` accepts.

    Raises:
        Refused: it would not be positive, or no reader reports a card.
    """
    free = min(each for reading in _read(readers).values() for each in reading)
    if free <= MARGIN:
        raise Refused(f"a card has {free / GIB:.1f} GiB free; more than {MARGIN / GIB:.0f} GiB are needed")
    return free - MARGIN


def balloon(left: int, device: torch.device) -> torch.Tensor:
    """Plain memory of a device: what is free now but `left` bytes. The balloon lives as long as the tensor.

    Raises:
        Refused: no more than `left` bytes are free; or torch_uvm is on, which would make it managed memory.
    """
    if _C.is_enabled():
        raise Refused("torch_uvm is on: the balloon would be managed memory")
    free = torch.get_device_module(device).mem_get_info(device)[0]
    if free <= left:
        raise Refused(f"{device} has {free / GIB:.2f} GiB free; the balloon is to leave {left / GIB:.2f} GiB")
    return torch.empty(free - left, dtype=torch.uint8, device=device)


def room_beside_a_balloon(readers: Mapping[str, Reader] = READERS) -> int:
    """The limit of managed memory beside a balloon: half of what any reader reports free.

    Raises:
        Refused: no reader reports a card; or managed memory was allocated before.
    """
    return min(each // 2 for free in _read(readers).values() for each in free)


def environment(limit: int) -> dict[str, str]:
    """Variables to add to the environment of child processes."""
    return {"TORCH_UVM_CONF": f"limit:{limit}"}


def check_program(text: str, limit: int) -> None:
    """Raises Refused if a program's text, or its TORCH_UVM_CONF, would lift or raise the limit."""
    if _UNLIMITED.search(text):
        raise Refused("the program takes the limit away: " + _UNLIMITED.findall(text)[0])
    for figure in _SETS_LIMIT.findall(text):
        if _C.parse_bytes(figure.strip().replace("_", "")) > limit:
            raise Refused(f"the program sets a limit of {figure}; at most {limit} bytes are allowed here")


def check_afterwards(allowed: int, limit: int | None, peak: int, lowest_free: int | None = None) -> None:
    """Checks what a program did.

    Args:
        allowed: the limit that it was to have.
        limit: the limit that was in force at its end.
        peak: the most managed memory that it reserved, in bytes.
        lowest_free: the fewest bytes that the card had free meanwhile, if somebody watched.

    Raises:
        Refused: the limit was exceeded or is not in force, or the card was almost full.
    """
    if limit is None or limit > allowed:
        raise Refused(f"the limit is {limit}; it was to stay at or below {allowed}")
    if peak > allowed:
        raise Refused(f"{peak} bytes of managed memory were reserved; the limit is {allowed}")
    if lowest_free is not None and lowest_free < LEAST_FREE:
        raise Refused(f"the card had {lowest_free} bytes free at a time; at least {LEAST_FREE} have to stay")


class Guard:
    """Holds the limit of this process: it can be lowered, but not raised above its initial value."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._real: dict[str, Any] = {}
        self._before: int | None = None

    def hold(self) -> Guard:
        """Sets the limit. From here on every call that would raise it fails."""
        self._before = _C.get_limit()
        self._real = {name: getattr(_C, name) for name in ("set_limit", "set_option", "load_options")}
        self._real["set_limit"](self.limit)
        _C.set_limit = self._set_limit
        _C.set_option = self._set_option
        _C.load_options = self._load_options
        return self

    def release(self) -> None:
        """Restores the previous state, for the guard's own tests."""
        for name, function in self._real.items():
            setattr(_C, name, function)
        if self._real:
            self._real["set_limit"](self._before)
        self._real = {}

    def reset(self) -> None:
        """Restores the guard's limit after it was lowered."""
        self._real["set_limit"](self.limit)

    def check(self) -> None:
        """Raises Refused if reserved memory ever exceeded the limit, if the limit is not in force, or if a
        card is almost full now."""
        peak = _C.peak_managed_bytes() if _C.in_use() else 0
        check_afterwards(self.limit, _C.get_limit(), peak, min(free_by_nvml() or [MARGIN]))

    def _set_limit(self, limit: int | None) -> None:
        if limit is None or limit > self.limit:
            raise Refused(f"a limit of {limit} is asked for; at most {self.limit} bytes are allowed here")
        self._real["set_limit"](limit)

    def _set_option(self, key: str, value: str) -> None:
        check_program(f"{key}:{value}", self.limit)
        self._real["set_option"](key, value)

    def _load_options(self, text: str) -> None:
        check_program(text, self.limit)
        self._real["load_options"](text)
        if _C.get_limit() is None:  # options without a limit lift it
            self.reset()
