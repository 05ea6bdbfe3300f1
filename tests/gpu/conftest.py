"""Fixtures of the suite for a real GPU. ../_gpu_guard.py protects the machine.

The suite is skipped, with the reason, without a GPU or if the extension was built without CUDA. With
TORCH_UVM_REQUIRE_CUDA=1 that is an error instead.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _cuda_cases import FROM_CPU_SUITE
from _gpu_guard import GIB, Guard, Refused, check_program, check_room, environment
from _spawn import Spawn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_uvm
from torch_uvm import _C

HERE = Path(__file__).resolve().parent
TOTAL = 4 * GIB  # sum over all processes of pytest-xdist
SANITIZED = frozenset(
    line.strip()
    for line in (HERE / "sanitizer.txt").read_text().splitlines()
    if line.strip()[:1] not in ("", "#")
)

_guard: Guard | None = None


def limit() -> int:
    return TOTAL // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def missing() -> str | None:
    """The reason why the suite cannot run, or None."""
    if not _C.built_with_cuda():
        return "torch_uvm was built without its CUDA layer"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if _C.backend() != "cuda":
        return f"torch_uvm's backend is {_C.backend()!r}, not 'cuda'"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "memcheck: in the subset for compute-sanitizer (tests/gpu/sanitizer.txt)"
    )
    # A marker of pytest-timeout, declared here because the plugin may be absent.
    config.addinivalue_line("markers", "timeout(seconds): the test is given up after so long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    global _guard
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        if any(item.nodeid.endswith(name) or f"{name}[" in item.nodeid for name in SANITIZED):
            item.add_marker("memcheck")
    if not ours or config.option.collectonly:
        return
    leave_out_the_other_mode(config, items)
    reason = missing()
    if reason is not None:
        if os.environ.get("TORCH_UVM_REQUIRE_CUDA") == "1":
            pytest.exit(f"TORCH_UVM_REQUIRE_CUDA=1, but {reason}", returncode=3)
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    if _guard is None:
        try:
            # For all workers together: each sees the whole card.
            check_room(TOTAL)
        except Refused as error:
            pytest.exit(f"not safe to run: {error}", returncode=4)
        _guard = Guard(limit()).hold()


def leave_out_the_other_mode(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With CUDA_LAUNCH_BLOCKING=1 the CPU suite's cases run: they need kernels that are done when their call
    returns. Without it the cases for CUDA run: they need kernels that are not. The sanitizer's subset does
    not depend on it."""
    if "memcheck" in (config.option.markexpr or ""):
        return
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
    other = [
        item
        for item in items
        if HERE in item.path.parents
        and isinstance(item, pytest.Function)
        and hasattr(item.module, FROM_CPU_SUITE) != blocking
    ]
    config.hook.pytest_deselected(items=other)
    gone = set(other)
    items[:] = [item for item in items if item not in gone]


class GuardedSpawn(Spawn):
    """Starts processes under this process's limit."""

    def __call__(
        self,
        code: str | None = None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        check: bool = True,
        timeout: float = 120,
        fork: bool = True,
    ) -> Any:
        wanted = dict(env or {})
        conf = wanted.get("TORCH_UVM_CONF")
        for text in (code or "", conf or "", *args):
            check_program(text, limit())
        ours = environment(limit())["TORCH_UVM_CONF"]
        wanted["TORCH_UVM_CONF"] = conf if conf and "limit:" in conf else ",".join(filter(None, [conf, ours]))
        return super().__call__(code, args=args, env=wanted, check=check, timeout=timeout, fork=fork)


@pytest.fixture
def spawn(tmp_path: Path) -> Spawn:
    return GuardedSpawn(tmp_path)


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Replaces the CPU suite's fixture. After each test everything is off, the allocator's invariants hold,
    and the limit was kept. The limit is never lifted."""
    assert _guard is not None, "a test runs without the guard"
    _guard.reset()
    yield
    torch_uvm.disable()
    torch_uvm._patches.tensor_to.choose_moves(False)
    if _C.host_tensors():
        _C.set_host_tensors(False)
    _guard.check()
    _guard.reset()
    gc.collect()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        # After such an error no CUDA call works in this process. The next test gets a new process if
        # possible.
        print(f"CUDA is lost to this process: {error}", file=sys.stderr, flush=True)
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(70)
        pytest.exit(f"CUDA is lost to this process: {error}", returncode=5)
    assert _C.check_allocator() is None


@pytest.fixture
def to_the_last_bit() -> Iterator[None]:
    """Makes kernels deterministic, so that two plain runs are equal. Afterwards removes the budget."""
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        gc.collect()
        torch.cuda.synchronize()
        _C.request_budget(None, None)
        torch_uvm.memory.empty_cache()
