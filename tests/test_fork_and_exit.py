"""Processes that end, and processes that fork, with tensors alive."""

from __future__ import annotations

import pytest
from _spawn import Spawn

PRELUDE = """
import os, sys, threading
import torch, torch_uvm
torch_uvm.enable()

def in_child(body):
    '''Runs body in a forked child; its exit status.'''
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads are the parent's, as in a DataLoader's worker
        try:
            body()
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


class TestExit:
    """A process ends with status 0 and no word, whatever is alive."""

    @pytest.mark.parametrize(
        "alive",
        [
            "x = torch.ones(1 << 20, device='emu')",
            "torch_uvm.disable(); x = torch.ones(1 << 20, device='emu')",
            "x = torch_uvm.ones(1 << 20, device='cpu')",
            "x = torch.ones(8, device='emu', requires_grad=True); loss = x.exp().sum(); loss.backward()",
            "x = torch.ones(1 << 20).pin_memory(); y = x.to('emu', non_blocking=True)",
            "s = torch.emu.Stream(); e = torch.Event('emu'); e.record(s); g = torch.Generator('emu')",
            "sys.modules['kept'] = torch.ones(1 << 20, device='emu')",
            "scope = torch_uvm.enabled(); scope.__enter__()",
        ],
        ids=["managed", "plain", "host", "graph", "pending-copy", "streams", "in-modules", "open-scope"],
    )
    def test_with_live_objects(self, spawn: Spawn, alive: str) -> None:
        done = spawn(PRELUDE + alive)
        assert (done.returncode, done.stderr) == (0, "")

    def test_while_a_thread_allocates(self, spawn: Spawn) -> None:
        """Not a daemon thread: killed in mid-call by the interpreter, those abort PyTorch on any device."""
        done = spawn(
            PRELUDE
            + """
def work():
    for _ in range(2000):
        torch.ones(1000, device="emu").sum()

for _ in range(3):
    threading.Thread(target=work).start()
"""
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_with_delayed_work(self, spawn: Spawn) -> None:
        env = {"TORCH_UVM_CONF": "emulated_schedule_seed:1"}
        code = "x = torch.ones(1 << 20).pin_memory(); y = [x.to('emu', non_blocking=True) for _ in range(8)]"
        done = spawn(PRELUDE + code, env=env)
        assert (done.returncode, done.stderr) == (0, "")


class TestFork:
    def test_child_reads_what_the_parent_has(self, spawn: Spawn) -> None:
        """64 MiB on the host's label and 64 MiB on the device's, copied on write as any memory."""
        spawn(
            PRELUDE
            + """
host = torch_uvm.full((16 << 20,), 3.0, device="cpu")
device = torch.full((16 << 20,), 4.0, device="emu")

def body():
    assert host.sum().item() == 3.0 * (16 << 20)
    assert device.cpu().sum().item() == 4.0 * (16 << 20)
    host.zero_()

assert in_child(body) == 0
assert host[0].item() == 3.0 and device.sum().item() == 4.0 * (16 << 20)
"""
        )

    def test_child_allocates_ordinary_memory_on_the_host_only(self, spawn: Spawn) -> None:
        spawn(
            PRELUDE
            + """
x = torch.ones(16 << 20, device="emu")
before = torch_uvm.memory_stats()

def body():
    assert not torch_uvm.is_managed(torch_uvm.ones(1000, device="cpu"))
    for make in (lambda: torch.ones(8, device="emu"), lambda: x + 1):
        try:
            make()
        except RuntimeError as error:
            assert "fork" in str(error) and "spawn" in str(error), error
        else:
            raise AssertionError("the child had device memory")

assert in_child(body) == 0
assert torch_uvm.memory_stats() == before
torch.ones(8, device="emu")
"""
        )

    def test_child_frees_without_harm(self, spawn: Spawn) -> None:
        spawn(
            PRELUDE
            + """
tensors = [torch.full((1 << 20,), float(i), device="emu") for i in range(16)]

def body():
    tensors.clear()
    torch_uvm.empty_cache()

assert in_child(body) == 0
assert [t[0].item() for t in tensors] == list(range(16))
"""
        )

    def test_while_other_threads_allocate(self, spawn: Spawn) -> None:
        """No child inherits a lock that another thread holds."""
        spawn(
            PRELUDE
            + """
stop = threading.Event()

def work():
    while not stop.is_set():
        kept = [torch.ones(n, device="emu") for n in (10, 1000, 100000)]
        kept[0].cpu()

# PyTorch chooses a kernel at its first call, under a lock of its own that a child could inherit.
torch.ones(10, device="emu").cpu()
torch_uvm.ones(8, device="cpu")

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()

def body():
    torch_uvm.memory_stats()
    torch_uvm.ones(8, device="cpu")

statuses = [in_child(body) for _ in range(40)]
stop.set()
for thread in threads:
    thread.join()
assert statuses == [0] * 40, statuses
"""
        )

    def test_data_loader_workers(self, spawn: Spawn) -> None:
        spawn(
            PRELUDE
            + """
from torch.utils.data import DataLoader, TensorDataset
alive = torch.ones(16 << 20, device="emu")
data = torch_uvm.empty(64, 1 << 18, device="cpu").copy_(torch.arange(64.0)[:, None].expand(-1, 1 << 18))
assert data.untyped_storage().nbytes() == 64 << 20 and torch_uvm.is_managed(data)
loader = DataLoader(TensorDataset(data), batch_size=8, num_workers=2, multiprocessing_context="fork")
total = sum(batch.to("emu").double().mean().item() for (batch,) in loader)
assert total == sum(range(64)) / 8, total
assert alive.sum().item() == 16 << 20
"""
        )
