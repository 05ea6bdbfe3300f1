from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _spawn import Spawn

ROOT = Path(__file__).resolve().parent.parent

#: Of documents, result files and benchmarks; and what takes minutes.
NIGHTLY = frozenset(
    "test_bench_residency_runs test_bench_schedules test_docs test_docs_site test_documented_code "
    "test_dry_op_tables test_full_card test_plan_errors test_sanitizers".split()
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpp-build",
        type=Path,
        default=ROOT / "build" / "cpp",
        help="where the C++ layers' tests were built (test_cpp_layers.py)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a worker gets one file at a time, because of its fixtures. Two exceptions: the
    C++ tests are split by binary, and the files that compile the CUDA flavour go to one worker, so that it is
    compiled once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, name = nodeid.partition("::")
            if file.endswith("test_cpp_layers.py"):
                return name.rpartition("-")[0]
            return "cuda" if Path(file).name.startswith(("test_cuda_control", "test_cuda_flavour")) else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves to `make test-nightly`."""
    for item in items:
        if item.path.stem in NIGHTLY:
            item.add_marker("nightly")


@pytest.fixture
def spawn(tmp_path: Path) -> Spawn:
    return Spawn(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def freeze_what_is_imported() -> None:
    """Freezes imported objects: collecting garbage over all that torch imported takes 0.1 s per test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """After each test everything that enable() sets is off or the default, garbage is collected, and the
    allocator's invariants hold. Does nothing if torch_uvm was not imported: the C++ tests also run
    where it is not built."""
    yield
    torch_uvm = sys.modules.get("torch_uvm")
    if torch_uvm is None:
        return
    torch_uvm.disable()
    torch_uvm._patches.tensor_to.choose_moves(False)
    if torch_uvm._C.host_tensors():
        torch_uvm._C.set_host_tensors(False)
    torch_uvm.set_limit(None)
    torch_uvm.set_host_limit("auto")
    if torch_uvm._patches.deferred_updates.chosen() == "in_place":
        torch_uvm._patches.deferred_updates.choose("auto")
    gc.collect()
    assert torch_uvm._C.check_residency() is None
    torch_uvm._C.request_budget(None, None)
    assert torch_uvm._C.check_allocator() is None
    if torch_uvm._C.backend() == "emulated":
        # Ordinary memory that is cached leaves less to later budgets. Our empty_cache() keeps it.
        sys.modules["torch"].accelerator.empty_cache()


@pytest.fixture
def evicting() -> Iterator[None]:
    """Managed memory under a budget. Each storage of any size is evicted after each operator.

    An address that an operator kept is therefore invalid afterwards.
    """
    torch_uvm = sys.modules["torch_uvm"]
    torch_uvm.enable(budget="64MiB")
    torch_uvm._C.set_option("relocation_min", "1")
    torch_uvm._C.evict_after_operators(True)
    yield
    torch_uvm._C.evict_after_operators(False)
    torch_uvm._C.set_option("relocation_min", "256KiB")


@pytest.fixture
def steps_at_once_afterwards() -> Iterator[None]:
    """For tests of deferred steps: runs pending updates and disables deferral afterwards."""
    yield
    torch_uvm = sys.modules["torch_uvm"]
    torch_uvm.enable(budget=None, optimizer="auto")
    assert torch_uvm._C.pending_updates() == 0
    torch_uvm.disable()
    gc.collect()
    torch_uvm._C.request_budget(None, None)
    torch_uvm.memory.empty_cache()
