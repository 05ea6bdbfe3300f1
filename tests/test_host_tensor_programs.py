"""Managed CPU tensors past the limit, in threads, in training and data loading, and in other processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from _host_tensors import (
    DEVICE,
    MIB,
    PRELUDE,
    host_bytes,
    host_tensors_on,  # noqa: F401  (every test has it)
)
from _models import train
from _spawn import Run, Spawn
from _threads import in_threads
from torch import nn

import torch_uvm
from torch_uvm import _C


@pytest.fixture(name="run")
def run_after_the_prelude(spawn: Spawn) -> Run:
    return spawn.after(PRELUDE)


class TestRunningOut:
    def test_past_the_limit_a_script_gets_ordinary_memory_and_one_warning(self) -> None:
        """The script requested CPU tensors, so ordinary memory is a valid fallback."""
        kept = torch.ones(4 * MIB)
        before = _C.get_limit()
        torch_uvm.set_limit(_C.managed_bytes() + MIB)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            refused = [torch.arange(64 * MIB, dtype=torch.uint8) for _ in range(2)]
        assert [torch_uvm.is_managed(x) for x in refused] == [False, False]
        assert all(int(x[-1]) == (64 * MIB - 1) % 256 for x in refused)
        assert torch_uvm.is_managed(kept)
        ours = [str(each.message) for each in told if "ordinary memory" in str(each.message)]
        assert len(ours) <= 1, "the warning is given once per process"
        torch_uvm.set_limit(before)
        assert torch_uvm.is_managed(torch.ones(16 * MIB))

    def test_the_warning_names_the_limit(self, run: Run) -> None:
        done = run("""
torch_uvm.set_limit("32MiB")
tensors = [torch.ones(4 << 20) for _ in range(6)]
print([torch_uvm.is_managed(x) for x in tensors])
""")
        assert done.stdout.split() == ["[True,", "True,", "False,", "False,", "False,", "False]"]
        assert done.stderr.count("ordinary memory") == 1
        assert "limit" in done.stderr and "32" in done.stderr

    def test_explicit_requests_for_managed_memory_are_refused(self) -> None:
        torch_uvm.set_limit(_C.managed_bytes() + MIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch_uvm.memory.empty(64 * MIB, device="cpu")


class TestThreads:
    def test_many_allocate_and_free(self) -> None:

        def work(seed: int) -> None:
            kept: list[tuple[int, torch.Tensor]] = []
            for i in range(60):
                value = seed * 1000 + i
                x = torch.full((MIB // 4 + 4096 * (i % 7),), float(value))
                assert torch_uvm.is_managed(x)
                kept.append((value, x))
                if len(kept) > 5:
                    wanted, old = kept.pop(i % 5)
                    assert old.min() == old.max() == wanted

        in_threads(*(partial(work, seed) for seed in range(8)))
        assert host_bytes() == 0 and _C.check_allocator() is None

    def test_made_by_one_and_freed_by_another(self) -> None:
        made = [torch.full((MIB,), 3.0) for _ in range(8)]

        def drop() -> None:
            while made:
                assert made.pop()[-1] == 3.0

        in_threads(drop)
        assert host_bytes() == 0


class TestPrograms:
    @pytest.mark.parametrize("device", ["cpu", DEVICE])
    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_training_is_equal_to_the_last_bit(
        self, device: str, optimizer: Callable[..., torch.optim.Optimizer]
    ) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(600, 512), nn.ReLU(), nn.Linear(512, 600), nn.LayerNorm(600))
        data: list[torch.Tensor] = []

        def make_input() -> torch.Tensor:
            data.append(torch.randn(512, 600))
            return data[-1]

        with torch_uvm.disabled():
            expected = train(model, make_input, device, optimizer=optimizer)
            assert not any(torch_uvm.is_managed(batch) for batch in data)
        data.clear()
        run = train(model, make_input, device, optimizer=optimizer)
        assert run == expected
        assert data and all(torch_uvm.is_managed(batch) for batch in data)

    def test_profiler_counts_them_as_the_cpus(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            x = torch.ones(8 * MIB, dtype=torch.uint8)
            del x
        events = [e for e in profile.events() or [] if e.name in ("aten::empty", "[memory]")]
        figures = [e.cpu_memory_usage if hasattr(e, "cpu_memory_usage") else 0 for e in events]
        assert 8 * MIB in figures and -8 * MIB in figures, figures

    def test_data_loader_collates_into_them(self) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(4.0 * MIB).view(16, -1))
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4):
            assert torch_uvm.is_managed(batch) and batch.shape == (4, MIB // 4)


class TestProcesses:
    @pytest.mark.parametrize(
        "alive",
        [
            "x = torch.ones(1 << 20)",
            "x = torch.ones(1 << 20); y = torch_uvm.to(x, 'emu')",
            "sys.modules['kept'] = torch.ones(1 << 20)",
            "x = torch.ones(1 << 20); torch_uvm.enable(host_tensors=False); torch_uvm.disable()",
            "x = torch.ones(1 << 20, requires_grad=True); (x * 2).sum().backward()",
            "x = torch.ones(1 << 20).to('emu', non_blocking=True)",
        ],
        ids=["one", "moved", "in-modules", "switched-off", "graph", "pending-copy"],
    )
    def test_exit_with_live_ones(self, run: Run, alive: str) -> None:
        done = run(alive, env={"TORCH_UVM_DEVICE": "emu"})
        assert (done.returncode, done.stderr) == (0, "")

    def test_forked_children_read_them_and_make_ordinary_ones(self, run: Run) -> None:
        run("""
data = torch.arange(1 << 22)
moved = torch_uvm.to(torch.arange(1 << 20), "emu")

def body():
    new = torch.ones(1 << 19)
    assert new.nbytes == 2 << 20 and not torch_uvm.is_managed(new)
    assert not torch_uvm.is_managed(data * 2)
    assert torch_uvm.is_managed(data) and torch.equal(data, torch.arange(1 << 22))
    data.resize_(1 << 23)
    assert not torch_uvm.is_managed(data) and data[(1 << 22) - 1] == (1 << 22) - 1

child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    try:
        body()
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(data, torch.arange(1 << 22)) and torch_uvm.is_managed(data * 2)
""")

    def test_forked_data_loader_workers(self, run: Run) -> None:
        run("""
from torch.utils.data import DataLoader, TensorDataset
data = torch.arange(64.0)[:, None].repeat(1, 1 << 18)
assert data.nbytes == 64 << 20 and torch_uvm.is_managed(data)
loader = DataLoader(TensorDataset(data), batch_size=8, num_workers=2, multiprocessing_context="fork")
for number, (batch,) in enumerate(loader):
    assert batch.is_shared() and not torch_uvm.is_managed(batch)
    assert torch.equal(batch, data[8 * number : 8 * number + 8])
assert number == 7
""")
