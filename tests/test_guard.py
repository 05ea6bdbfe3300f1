"""The guard: one function makes every managed allocation, after checking device, limit and host memory.

In the source, no other function calls the runtime's managed allocation. In behaviour, every way to allocate
is refused beyond the limit, the host's memory and a device's budget.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from _idle_memory import all_memory_comes_back  # noqa: F401  (every test has it)

import torch_uvm
from torch_uvm import _C

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ROOT / "csrc"
MIB = 1 << 20

#: Calls that can make managed memory, and the one file that may contain each; None: no file.
MAKERS: dict[str, str | None] = {
    r"do_allocate_managed": "runtime/managed_runtime.cpp",
    r"cudaMallocManaged": "cuda/cuda_runtime.cpp",
    r"cudaMallocFromPoolAsync|cudaMallocAsync": None,
    r"cuMemAllocManaged|cuMemAllocFromPoolAsync|cuMemAllocAsync": None,
    r"cudaHostRegister": "cuda/pinned_memory.cpp",
    r"cuMemHostRegister|cuMemCreate|cuMemMap|hipMallocManaged": None,
}
#: Files that may map host memory: runtimes without a device, pinned memory, and copies for a forked child.
MAPPERS = {
    r"\bmmap": {"runtime/host_memory.cpp"},
    r"map_host_memory": {
        "cuda/pinned_memory.cpp",
        "runtime/emulated/emulated_runtime.cpp",
    },
}


def without_comments(source: str) -> str:
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', source)


def calls(source: str, name: str) -> int:
    """Counts calls of a function. Declarations and definitions, which follow a type, and text do not
    count."""
    found = re.finditer(rf"(?:{name})\s*\(", source)
    contexts = [source[max(it.start() - 40, 0) : it.start()] for it in found]
    return sum(1 for it in contexts if not re.search(r"(?:void\*\s+(?:\w+::)?|cudaError_t\s+|[\w:])$", it))


def callers(name: str, sources: dict[str, str]) -> dict[str, int]:
    return {file: count for file, text in sources.items() if (count := calls(text, name))}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    files = [it for it in LAYERS.rglob("*") if it.suffix in (".cpp", ".h", ".cu", ".cuh")]
    return {str(it.relative_to(LAYERS)): without_comments(it.read_text()) for it in files}


class TestSource:
    def test_the_check_sees_a_second_caller(self) -> None:
        words = 'void* f() {\n  // cudaMallocManaged(1)\n  say("cudaMallocManaged(1)");\n'
        call = "  return cudaMallocManaged(&p, n);\n}"
        assert calls(without_comments(words), "cudaMallocManaged") == 0
        assert calls(without_comments(words + call), "cudaMallocManaged") == 1
        assert calls("  void* do_allocate_managed(std::size_t bytes) override;", "do_allocate_managed") == 0
        assert calls("void* EmulatedRuntime::do_allocate_managed(int n) {", "do_allocate_managed") == 0
        assert calls("  p = do_allocate_managed(bytes, home);", "do_allocate_managed") == 1

    @pytest.mark.parametrize("name", MAKERS)
    def test_one_file_makes_managed_memory(self, name: str, sources: dict[str, str]) -> None:
        where = MAKERS[name]
        assert callers(name, sources) == ({} if where is None else {where: 1})

    @pytest.mark.parametrize("name", MAPPERS)
    def test_only_listed_files_map_memory(self, name: str, sources: dict[str, str]) -> None:
        assert set(callers(name, sources)) == MAPPERS[name]

    def test_the_checks_come_before_the_call(self, sources: dict[str, str]) -> None:
        text = sources["runtime/managed_runtime.cpp"]
        begin = text.index("void* ManagedRuntime::allocate_managed(")
        body = text[begin : text.index("\n}\n", begin)]
        checks = ["device_count()", ".managed_memory", "*limit_ - managed_bytes_", "> host_available"]
        places = [body.index(it) for it in [*checks, "do_allocate_managed("]]
        assert places == sorted(places)

    def test_the_checks_cannot_be_bypassed(self, sources: dict[str, str]) -> None:
        """It is not virtual, and the function that it calls is protected."""
        header = sources["runtime/managed_runtime.h"]
        assert re.search(r"\n  void\* allocate_managed\(", header)
        protected = header.index(" protected:")
        assert header.index("do_allocate_managed") > protected > header.index("void* allocate_managed(")
        for file, text in sources.items():
            for found in re.finditer(r"void\* do_allocate_managed\([^)]*\) override", text):
                assert " public:" not in text[text.rindex(" protected:", 0, found.start()) : found.start()], (
                    file
                )


# --- behaviour


def _managed(function: Callable[[], object]) -> object:
    with torch_uvm.enabled():
        return function()


def _by_operator(count: int) -> object:
    x = torch_uvm.memory.ones(1, device="emu").expand(count)
    return _managed(lambda: x + 1)


class _AllocatesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count  # type: ignore[attr-defined]
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty(ctx.count, device="emu"), None  # type: ignore[attr-defined]


def _backward(count: int) -> object:
    """Allocates in a thread of autograd."""
    x = torch_uvm.memory.ones(1, device="emu").expand(count).requires_grad_()
    return _managed(lambda: torch.autograd.grad(_AllocatesBackward.apply(x, count), x)[0])  # type: ignore[no-untyped-call]


def _in(scope: object, count: int) -> object:
    with scope, torch_uvm.enabled():  # type: ignore[attr-defined]
        return torch.empty(count, device="emu")


def _resized(count: int) -> object:
    x = torch_uvm.memory.empty(1, device="emu")
    return _managed(lambda: x.resize_(count))


#: Each way to allocate `count` floats of managed memory.
WAYS: dict[str, Callable[[int], object]] = {
    "empty": lambda count: torch_uvm.memory.empty(count, device="emu"),
    "zeros": lambda count: torch_uvm.memory.zeros(count, device="emu"),
    "ones": lambda count: torch_uvm.memory.ones(count, device="emu"),
    "full": lambda count: torch_uvm.memory.full((count,), 2.0, device="emu"),
    "empty_like": lambda count: torch_uvm.memory.empty_like(torch.ones(1).expand(count), device="emu"),
    "host": lambda count: torch_uvm.memory.empty(count, device="cpu"),
    "second device's label": lambda count: torch_uvm.to(torch.ones(1).expand(count), "emu", managed=True),
    "the switch": lambda count: _managed(lambda: torch.empty(count, device="emu")),
    "plain to": lambda count: _managed(lambda: torch.ones(1).expand(count).to("emu")),
    "an operator": _by_operator,
    "a gradient": _backward,
    "resize_": _resized,
    "an arena": lambda count: _in(torch_uvm.allocators.arena(), count),
    "a plan": lambda count: _in(torch_uvm.allocators.allocation_plan("guarded"), count),
    "caching": lambda count: torch_uvm.memory.empty(
        count, device="emu", allocator=torch_uvm.allocators.Allocator.caching()
    ),
    "a pool": lambda count: torch_uvm.memory.empty(
        count, device="emu", allocator=torch_uvm.allocators.Allocator.pool()
    ),
    "nested": lambda count: torch_uvm.memory.empty(
        count,
        device="emu",
        allocator=torch_uvm.allocators.Allocator.caching().with_statistics().with_limit(1 << 60),
    ),
    "a tensor from a file's sizes": lambda count: _managed(
        lambda: torch.empty(0, device="emu").set_(torch.UntypedStorage(4 * count, device="emu"))
    ),
}

OUT = (torch.OutOfMemoryError,)


@pytest.fixture
def nothing_cached() -> Iterator[None]:
    _C.release_idle_memory()
    torch_uvm.memory.empty_cache()
    yield
    torch_uvm.set_limit(None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("nothing_cached")
class TestEveryWay:
    def test_serves_a_request_that_fits(self, way: str) -> None:
        """Otherwise the refusals below would prove nothing."""
        before = _C.managed_bytes()
        made = WAYS[way](MIB)
        assert isinstance(made, torch.Tensor) and torch_uvm.is_managed(made)
        assert _C.managed_bytes() > before

    def test_stops_at_the_limit(self, way: str) -> None:
        torch_uvm.memory.empty(1, device="emu")  # creates the segment of small blocks
        limit = _C.managed_bytes() + 8 * MIB
        torch_uvm.set_limit(limit)
        with pytest.raises(OUT, match="limit"):
            WAYS[way](64 * MIB)
        assert _C.managed_bytes() <= limit

    def test_stops_at_the_hosts_memory(self, way: str) -> None:
        before = _C.managed_bytes()
        with pytest.raises(OUT, match="backed by the host|The budget of device 0"):
            WAYS[way](1 << 46)
        assert _C.managed_bytes() <= before + 64 * MIB  # small blocks allocated before the refusal


def test_many_small_ones_stop_at_the_limit() -> None:
    torch_uvm.memory.empty_cache()
    limit = _C.managed_bytes() + 16 * MIB
    torch_uvm.set_limit(limit)
    kept: list[torch.Tensor] = []
    with pytest.raises(OUT, match="limit"):
        while True:
            kept.append(torch_uvm.memory.empty(1000, device="emu" if len(kept) % 2 else "cpu"))
            assert _C.managed_bytes() <= limit
    assert len(kept) > 1000
    kept.clear()


def test_a_devices_budget_is_not_overrun_by_any_way() -> None:
    """Allocations beyond the budget go to the host or are refused. They are never on the device."""
    budget = 16 * MIB
    torch_uvm.enable(budget=budget)
    kept: list[object] = []
    for name, way in WAYS.items():
        if name in ("host", "nested", "caching", "a pool", "an arena", "a plan"):
            continue  # their blocks are not movable
        try:
            kept.append(way(MIB))
        except torch.OutOfMemoryError:
            pass
        assert torch_uvm.emulated.resident_bytes(0) <= budget, name
    kept.clear()
