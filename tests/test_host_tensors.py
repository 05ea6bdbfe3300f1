"""`torch_uvm.enable(host_tensors=True)`: CPU tensors of at least 1 MiB come from managed memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from _models import train
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C

ACCELERATOR = torch.accelerator.current_accelerator()
assert ACCELERATOR is not None
DEVICE = ACCELERATOR.type
MIB = 1024**2

PRELUDE = """
import os, sys, threading
import torch, torch_uvm
torch_uvm.enable(host_tensors=True)
"""


@pytest.fixture(autouse=True)
def host_tensors_on() -> Iterator[None]:
    gc.collect()
    torch_uvm.empty_cache()
    torch_uvm.enable(host_tensors=True)
    yield
    torch_uvm.enable(host_tensors=False)


def _host_bytes() -> int:
    return torch_uvm.memory_allocated("cpu")


class TestWhatIsManaged:
    def test_from_a_mebibyte_on(self) -> None:
        assert torch_uvm.is_managed(torch.empty(MIB, dtype=torch.uint8))
        assert not torch_uvm.is_managed(torch.empty(MIB - 1, dtype=torch.uint8))
        assert not torch_uvm.is_managed(torch.empty(0))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(MIB),
            lambda: torch.randn(1024, 1024),
            lambda: torch.arange(MIB),
            lambda: torch.empty(MIB, dtype=torch.complex64),
            lambda: torch.zeros(MIB, dtype=torch.bool),
            lambda: torch.ones(1024, 1024, dtype=torch.bfloat16),
            lambda: torch.ones(1024, 1024) @ torch.ones(1024, 1024),
            lambda: torch.ones(1024, 1024).t().contiguous(),
            lambda: torch.ones(1024, 1024)[::2, ::2],
            lambda: torch.stack([torch.ones(1024) for _ in range(300)]),
            lambda: nn.Linear(1024, 1024).weight,
            lambda: torch.ones(4, MIB, device=DEVICE).cpu(),
            lambda: torch.ones(MIB, requires_grad=True).exp(),
            lambda: torch.ones(MIB).clone(),
        ],
    )
    def test_however_it_is_made(self, make: Callable[[], torch.Tensor]) -> None:
        x = make()
        assert x.device.type == "cpu" and torch_uvm.is_managed(x)

    def test_gradients(self) -> None:
        x = torch.ones(MIB, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad is not None and torch_uvm.is_managed(x.grad)
        assert x.grad[0] == 2

    def test_they_are_at_home_on_the_host_and_given_back(self) -> None:
        x = torch.empty(4 * MIB, dtype=torch.uint8)
        assert _host_bytes() == 4 * MIB
        view = x[10:20]
        del x
        assert _host_bytes() == 4 * MIB
        del view
        assert _host_bytes() == 0

    def test_off_by_default(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            torch_uvm.enable()
            assert not torch_uvm.is_managed(torch.ones(1 << 20)) and not torch_uvm._C.host_tensors()
            torch_uvm.enable(host_tensors=True)
            assert torch_uvm.is_managed(torch.ones(1 << 20)) and torch_uvm._C.host_tensors()
            torch_uvm.enable()
            assert not torch_uvm.is_managed(torch.ones(1 << 20))
            """
        )

    def test_values_are_as_ever(self) -> None:
        torch.manual_seed(5)
        managed = torch.randn(512, 1024).cumsum(0).softmax(1)
        with torch_uvm.disabled():
            torch.manual_seed(5)
            ordinary = torch.randn(512, 1024).cumsum(0).softmax(1)
        assert torch_uvm.is_managed(managed) and not torch_uvm.is_managed(ordinary)
        assert torch.equal(managed, ordinary)


class TestSwitch:
    def test_scopes_and_disable(self) -> None:
        with torch_uvm.disabled():
            assert not torch_uvm.is_managed(torch.ones(MIB))
            with torch_uvm.enabled():
                assert torch_uvm.is_managed(torch.ones(MIB))
        torch_uvm.disable()
        assert not torch_uvm.is_managed(torch.ones(MIB))
        with torch_uvm.enabled():
            assert torch_uvm.is_managed(torch.ones(MIB))

    def test_existing_ones_outlive_disable(self) -> None:
        x = torch.arange(MIB)
        torch_uvm.enable(host_tensors=False)
        assert not torch_uvm.is_managed(torch.ones(MIB))
        torch_uvm.disable()
        assert torch_uvm.is_managed(x)
        x += 1
        assert x[-1] == MIB and not torch_uvm.is_managed(x + 1)
        del x
        assert _host_bytes() == 0

    def test_a_scope_is_its_threads(self) -> None:
        seen: list[bool] = []
        with torch_uvm.disabled():
            thread = threading.Thread(target=lambda: seen.append(torch_uvm.is_managed(torch.ones(MIB))))
            thread.start()
            thread.join()
        assert seen == [True]

    def test_without_a_backend_it_is_refused(self, spawn: Spawn) -> None:
        """Beside an accelerator that there is no backend for."""
        spawn(
            """
            import torch
            torch.accelerator.current_accelerator = lambda check_available=False: torch.device("xpu")
            import torch_uvm
            assert torch_uvm._C.backend() == "none"
            for enable in (lambda on: torch_uvm.enable(host_tensors=on), torch_uvm._C.set_host_tensors):
                try:
                    enable(True)
                except RuntimeError:
                    pass
                else:
                    raise AssertionError("it was not refused")
            torch_uvm._C.set_host_tensors(False)
            assert not torch_uvm._C.host_tensors() and not torch_uvm.is_managed(torch.ones(1 << 20))
            """
        )


class TestWhatStaysWhatItIs:
    def test_memory_that_others_made(self, tmp_path: Path) -> None:
        array = np.ones(MIB)
        assert not torch_uvm.is_managed(torch.from_numpy(array))
        assert not torch_uvm.is_managed(torch.frombuffer(bytearray(MIB), dtype=torch.uint8))
        torch.save(torch.ones(MIB), tmp_path / "x.pt")
        assert not torch_uvm.is_managed(torch.load(tmp_path / "x.pt", mmap=True))

    def test_pinned_memory(self) -> None:
        x = torch.ones(MIB).pin_memory()
        assert x.is_pinned() and not torch_uvm.is_managed(x)

    def test_shared_memory(self) -> None:
        x = torch.arange(MIB)
        assert torch_uvm.is_managed(x)
        x.share_memory_()
        assert x.is_shared() and not torch_uvm.is_managed(x) and x[-1] == MIB - 1
        assert _host_bytes() == 0

    def test_numpy_sees_the_bytes(self) -> None:
        x = torch.zeros(MIB)
        x.numpy()[7] = 3.0
        assert x[7] == 3.0 and x.numpy().ctypes.data == x.data_ptr()

    def test_contents_travel(self) -> None:
        """torch.load asks for a CPU tensor; deepcopy and pickle make a storage, which PyTorch takes from
        its default allocator whatever the CPU's allocator is."""
        x = torch.arange(MIB)
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        made = [torch.load(file), pickle.loads(pickle.dumps(x)), copy.deepcopy(x)]
        assert [torch_uvm.is_managed(other) for other in made] == [True, False, False]
        assert all(torch.equal(other, x) and other.data_ptr() != x.data_ptr() for other in made)
        assert torch.UntypedStorage(MIB).nbytes() == MIB
        assert _host_bytes() == 2 * x.nbytes, "x, and what was loaded"

    def test_kernels_of_the_accelerator_do_not_take_them(self) -> None:
        """What they allocate, through the CPU's allocator, is the device's, however large."""
        before = _host_bytes()
        x = torch.randn(1024, 1024, device=DEVICE)
        y = torch.nn.functional.softmax(x @ x, 1).cumsum(0)
        assert _host_bytes() == before
        assert torch_uvm.memory_allocated(DEVICE) >= 2 * 4 * MIB
        assert torch_uvm.is_managed(y)
        del x, y

    def test_library_scratch_memory(self) -> None:
        """oneDNN's comes through raw_allocate, and goes back by its address alone."""
        torch.manual_seed(1)
        image = torch.randn(4, 16, 96, 96)
        layer = nn.Conv2d(16, 32, 5, padding=2)
        managed = layer(image)
        held = _host_bytes()
        for _ in range(3):
            assert torch.equal(layer(image), managed)
        assert _host_bytes() == held, "scratch memory was not given back"
        with torch_uvm.disabled():
            assert torch.equal(layer(image), managed)

    def test_copy_on_write_does_not_hide_them(self) -> None:
        """It would put a deleter of its own in the place of ours; it is refused, as for all such memory."""
        x = torch.arange(MIB)
        with pytest.raises(RuntimeError, match="storage"):
            torch._lazy_clone(x)
        assert torch_uvm.is_managed(x) and x[-1] == MIB - 1
        with torch_uvm.disabled():
            assert torch.equal(torch._lazy_clone(torch.arange(10)), torch.arange(10))


class TestResize:
    def test_grows_into_managed_memory(self) -> None:
        x = torch.arange(MIB)
        x.resize_(2 * MIB)
        assert torch_uvm.is_managed(x) and torch.equal(x[:MIB], torch.arange(MIB))
        del x
        assert _host_bytes() == 0

    def test_a_small_tensor_grows_into_it(self) -> None:
        x = torch.arange(10)
        x.resize_(MIB)
        assert torch_uvm.is_managed(x) and x[:10].tolist() == list(range(10))

    def test_while_off_it_grows_into_ordinary_memory(self) -> None:
        x = torch.arange(MIB)
        with torch_uvm.disabled():
            x.resize_(2 * MIB)
        assert not torch_uvm.is_managed(x) and torch.equal(x[:MIB], torch.arange(MIB))

    def test_not_while_it_has_two_labels(self) -> None:
        x = torch.arange(MIB)
        y = torch_uvm.to(x, DEVICE)
        with pytest.raises(RuntimeError):
            x.resize_(2 * MIB)
        assert y[-1].item() == MIB - 1


class TestMoves:
    def test_to_the_device_and_back(self) -> None:
        x = torch.arange(MIB)
        y = torch_uvm.to(x, DEVICE)
        assert y.device.type == DEVICE and y.data_ptr() == x.data_ptr() and torch_uvm.is_managed(y)
        y += 1
        z = torch_uvm.to(y, "cpu")
        assert z.data_ptr() == x.data_ptr() and torch.equal(x, torch.arange(1, MIB + 1))
        assert torch_uvm.is_managed(x) and torch_uvm.is_managed(z)
        base = x.untyped_storage()._cdata
        assert z.untyped_storage()._cdata == base, "a round trip gives the first storage back"

    def test_any_label_keeps_the_bytes(self) -> None:
        before = torch_uvm.memory_allocated()
        x = torch.arange(MIB)
        y = torch_uvm.to(x, DEVICE)
        del x
        assert y.sum().item() == MIB * (MIB - 1) // 2
        del y
        assert torch_uvm.memory_allocated() == before
        assert _C.check_allocator() is None

    def test_module(self) -> None:
        layer = nn.Linear(1024, 1024)
        address = layer.weight.data_ptr()
        torch_uvm.to(layer, DEVICE)
        assert layer.weight.device.type == DEVICE and layer.weight.data_ptr() == address
        assert layer(torch.ones(2, 1024, device=DEVICE)).shape == (2, 1024)

    def test_views_keep_offset_and_strides(self) -> None:
        x = torch.arange(4 * MIB).view(1024, 4096).t()[3:, 5:]
        y = torch_uvm.to(x, DEVICE)
        assert y.stride() == x.stride() and y.data_ptr() == x.data_ptr() and torch.equal(y.cpu(), x)

    def test_plain_copies_both_ways(self) -> None:
        x = torch.arange(MIB)
        y = x.to(DEVICE)
        assert y.data_ptr() != x.data_ptr() and torch.equal(y.cpu(), x)
        y += 1
        x.copy_(y)
        assert x[-1] == MIB
        z = torch.empty_like(x)
        z.copy_(y, non_blocking=True)
        torch.accelerator.synchronize()
        assert torch.equal(z, x)

    def test_memory_freed_while_a_copy_reads_it_is_not_reused_too_early(self, spawn: Spawn) -> None:
        """The copy is delayed; the host tensor is gone, and others are made, before it is done."""
        spawn(
            PRELUDE
            + """
for value in range(20):
    x = torch.full((1 << 18,), float(value))
    y = x.to("emu", non_blocking=True)
    del x
    others = [torch.full((1 << 18,), -1.0) for _ in range(4)]
    assert y.sum().item() == value * (1 << 18), value
""",
            env={"TORCH_UVM_CONF": "emulated_schedule_seed:2"},
        )


class TestRunningOut:
    def test_past_the_limit_a_script_gets_ordinary_memory_and_is_told_once(self) -> None:
        """It asked for a CPU tensor, and the host has memory for it."""
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
        assert len(ours) <= 1, "said once in a process"
        torch_uvm.set_limit(before)
        assert torch_uvm.is_managed(torch.ones(16 * MIB))

    def test_the_warning_names_the_limit(self, spawn: Spawn) -> None:
        done = spawn(
            PRELUDE
            + """
torch_uvm.set_limit("32MiB")
tensors = [torch.ones(4 << 20) for _ in range(6)]
print([torch_uvm.is_managed(x) for x in tensors])
"""
        )
        assert done.stdout.split() == ["[True,", "True,", "False,", "False,", "False,", "False]"]
        assert done.stderr.count("ordinary memory") == 1
        assert "limit" in done.stderr and "32" in done.stderr

    def test_asked_for_by_name_managed_memory_is_refused(self) -> None:
        torch_uvm.set_limit(_C.managed_bytes() + MIB)
        with pytest.raises(torch.OutOfMemoryError):
            torch_uvm.empty(64 * MIB, device="cpu")


class TestThreads:
    def test_many_allocate_and_free(self) -> None:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                kept: list[tuple[int, torch.Tensor]] = []
                for i in range(60):
                    value = seed * 1000 + i
                    x = torch.full((MIB // 4 + 4096 * (i % 7),), float(value))
                    assert torch_uvm.is_managed(x)
                    kept.append((value, x))
                    if len(kept) > 5:
                        wanted, old = kept.pop(i % 5)
                        assert old.min() == old.max() == wanted
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert _host_bytes() == 0 and _C.check_allocator() is None

    def test_made_by_one_and_freed_by_another(self) -> None:
        made = [torch.full((MIB,), 3.0) for _ in range(8)]

        def drop() -> None:
            while made:
                assert made.pop()[-1] == 3.0

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        assert _host_bytes() == 0


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
    def test_exit_with_live_ones(self, spawn: Spawn, alive: str) -> None:
        done = spawn(PRELUDE + alive)
        assert (done.returncode, done.stderr) == (0, "")

    def test_forked_children_read_them_and_make_ordinary_ones(self, spawn: Spawn) -> None:
        spawn(
            PRELUDE
            + """
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
"""
        )

    def test_forked_data_loader_workers(self, spawn: Spawn) -> None:
        spawn(
            PRELUDE
            + """
from torch.utils.data import DataLoader, TensorDataset
data = torch.arange(64.0)[:, None].repeat(1, 1 << 18)
assert data.nbytes == 64 << 20 and torch_uvm.is_managed(data)
loader = DataLoader(TensorDataset(data), batch_size=8, num_workers=2, multiprocessing_context="fork")
for number, (batch,) in enumerate(loader):
    assert batch.is_shared() and not torch_uvm.is_managed(batch)
    assert torch.equal(batch, data[8 * number : 8 * number + 8])
assert number == 7
"""
        )
