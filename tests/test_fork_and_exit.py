"""Processes that end, and processes that fork, with tensors alive. Children have no managed memory."""

from __future__ import annotations

import pytest
from _spawn import Run, Spawn

PRELUDE = """
import os, sys, threading, unittest
import torch, torch_uvm
torch_uvm.enable()
raises = unittest.TestCase().assertRaisesRegex

def in_child(body):
    '''Runs body in a forked child; its exit status.'''
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # as in a DataLoader's worker: OpenMP's threads only exist in the parent
        try:
            body()
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.fixture(name="run")
def run_after_the_prelude(spawn: Spawn) -> Run:
    return spawn.after(PRELUDE)


class TestExit:
    """A process exits with status 0 and without output, regardless of live objects."""

    @pytest.mark.parametrize(
        "alive",
        [
            "x = torch.ones(1 << 20, device='emu')",
            "torch_uvm.disable(); x = torch.ones(1 << 20, device='emu')",
            "x = torch_uvm.memory.ones(1 << 20, device='cpu')",
            "x = torch_uvm.to(torch.ones(1 << 20, device='emu'), 'cpu')",
            "x = torch.ones(8, device='emu', requires_grad=True); loss = x.exp().sum(); loss.backward()",
            "x = torch.ones(1 << 20).pin_memory(); y = x.to('emu', non_blocking=True)",
            "s = torch.emu.Stream(); e = torch.Event('emu'); e.record(s); g = torch.Generator('emu')",
            "sys.modules['kept'] = torch.ones(1 << 20, device='emu')",
            "scope = torch_uvm.enabled(); scope.__enter__()",
        ],
        ids=[
            "managed",
            "plain",
            "host",
            "moved",
            "graph",
            "pending-copy",
            "streams",
            "in-modules",
            "open-scope",
        ],
    )
    def test_with_live_objects(self, run: Run, alive: str) -> None:
        done = run(alive, env={"TORCH_UVM_DEVICE": "emu"})
        assert (done.returncode, done.stderr) == (0, "")

    def test_while_a_thread_allocates(self, run: Run) -> None:
        """Not a daemon thread: the interpreter kills those during a call, which aborts PyTorch on any
        device."""
        done = run(
            """
def work():
    for _ in range(2000):
        torch.ones(1000, device="emu").sum()

for _ in range(3):
    threading.Thread(target=work).start()
""",
            env={"TORCH_UVM_DEVICE": "emu"},
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_with_delayed_work(self, run: Run) -> None:
        env = {"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": "emulated_schedule_seed:1"}
        code = "x = torch.ones(1 << 20).pin_memory(); y = [x.to('emu', non_blocking=True) for _ in range(8)]"
        done = run(code, env=env)
        assert (done.returncode, done.stderr) == (0, "")


class TestFork:
    def test_child_reads_the_parents_host_tensors(self, run: Run) -> None:
        """64 MiB made under the host's label and 64 MiB moved there. The child's copy is copy-on-write."""
        done = run(
            """
count = 16 << 20
host = torch_uvm.memory.full((count,), 3.0, device="cpu")
device = torch.full((count,), 4.0, device="emu")
moved = torch_uvm.to(device, "cpu")
small = torch_uvm.memory.full((10,), 5.0, device="cpu")

def body():
    assert host.sum().item() == 3.0 * count
    assert moved.sum().item() == 4.0 * count and moved.data_ptr() == device.data_ptr()
    assert small.tolist() == [5.0] * 10
    assert host.numpy()[-1] == 3.0
    host.zero_()
    moved.add_(1.0)
    assert host.sum().item() == 0 and moved[-1].item() == 5.0

assert in_child(body) == 0
assert host[0].item() == 3.0 and moved[-1].item() == 4.0 and device.sum().item() == 4.0 * count
""",
            env={"TORCH_UVM_DEVICE": "emu"},  # a CUDA build without a GPU says so unless it is told
        )
        assert done.stderr == ""

    def test_child_reads_cpu_labels_of_moved_tensors(self, run: Run) -> None:
        """The CPU label still exists, and so do its bytes."""
        run("""
host = torch_uvm.memory.full((1 << 20,), 3.0, device="cpu")
device = torch_uvm.to(host, "emu")
device += 1
torch.emu.synchronize()

def body():
    assert host.sum().item() == 4.0 * (1 << 20)

assert in_child(body) == 0
""")

    @pytest.mark.parametrize(
        "touch",
        [
            "x.cpu()",
            "x.sum().item()",
            "x[0].item()",
            "repr(x)",
            "x.add_(1)",
            "x.copy_(torch.zeros(1 << 20))",
            "x.zero_()",
            "torch.zeros(1 << 20).copy_(x)",
            "x.clone()",
            "pickle.dumps(x)",
            "copy.deepcopy(x)",
            "x.tolist()",
            "torch_uvm.to(x, 'cpu')",
            "torch_uvm.to(host, 'emu')",
            "host.to('emu')",
            "torch.ones(8, device='emu')",
            "lstm(x[:8].view(1, 1, 8))",
        ],
    )
    def test_child_is_refused_the_devices_bytes_by_name(self, run: Run, touch: str) -> None:
        """The bytes are not mapped in the child: an access that was not refused would die of a signal."""
        run(f"""
import copy, pickle
x = torch.ones(1 << 20, device="emu")
host = torch_uvm.memory.ones(1 << 20, device="cpu")
lstm = torch.nn.LSTM(8, 8).to("emu")

def body():
    with raises(RuntimeError, "forked process"):
        {touch}

assert in_child(body) == 0
assert x.sum().item() == 1 << 20
""")

    def test_child_makes_views_of_device_tensors(self, run: Run) -> None:
        run("""
x = torch.ones(1 << 20, device="emu")

def body():
    assert x[3:].view(-1, 1).shape == ((1 << 20) - 3, 1) and torch_uvm.is_managed(x[5])

assert in_child(body) == 0
""")

    def test_child_allocates_ordinary_memory_on_the_host_only(self, run: Run) -> None:
        run("""
x = torch.ones(16 << 20, device="emu")
before = torch_uvm.memory.memory_stats()

def body():
    assert not torch_uvm.is_managed(torch_uvm.memory.ones(1000, device="cpu"))
    for make in (lambda: torch.ones(8, device="emu"), lambda: x + 1):
        with raises(RuntimeError, "fork") as caught:
            make()
        assert "spawn" in str(caught.exception), caught.exception

assert in_child(body) == 0
assert torch_uvm.memory.memory_stats() == before
torch.ones(8, device="emu")
""")

    def test_child_frees_inherited_tensors(self, run: Run) -> None:
        run("""
tensors = [torch.full((1 << 20,), float(i), device="emu") for i in range(16)]
host = [torch_uvm.memory.full((1 << 20,), float(i), device="cpu") for i in range(16)]

def body():
    tensors.clear()
    host.clear()
    torch_uvm.memory.empty_cache()

assert in_child(body) == 0
assert [t[0].item() for t in tensors] == list(range(16))
assert [t[0].item() for t in host] == list(range(16))
""")

    def test_child_of_a_child(self, run: Run) -> None:
        run("""
host = torch_uvm.memory.full((1 << 20,), 3.0, device="cpu")

def inner():
    assert host.sum().item() == 5.0 * (1 << 20)
    host.zero_()

def body():
    host.fill_(5.0)
    assert in_child(inner) == 0
    assert host[0].item() == 5.0

assert in_child(body) == 0
assert host[-1].item() == 3.0
""")

    def test_while_other_threads_allocate(self, run: Run) -> None:
        """No child inherits a lock that another thread holds."""
        run("""
stop = threading.Event()

def work():
    while not stop.is_set():
        kept = [torch.ones(n, device="emu") for n in (10, 1000, 100000)]
        kept[0].cpu()
        torch_uvm.to(kept[2], "cpu").fill_(1.0)
        torch_uvm.memory.ones(1000, device="cpu")

# PyTorch chooses a kernel in its first call, under its own lock, which a child could inherit locked.
torch.ones(10, device="emu").cpu()
torch_uvm.to(torch.ones(100000, device="emu"), "cpu").fill_(1.0)
torch_uvm.memory.ones(8, device="cpu")

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()

def body():
    torch_uvm.memory.memory_stats()
    torch_uvm.memory.ones(8, device="cpu")

statuses = [in_child(body) for _ in range(40)]
stop.set()
for thread in threads:
    thread.join()
assert statuses == [0] * 40, statuses
""")

    def test_twenty_forks_do_not_grow_the_parent(self, run: Run) -> None:
        """Each child gets a copy of 32 MiB. The parent keeps none of the copies."""
        run("""
data = torch_uvm.memory.ones(8 << 20, device="cpu")

def virtual():
    return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")

def body():
    assert data[-1].item() == 1.0

assert in_child(body) == 0
before = virtual()
for _ in range(20):
    assert in_child(body) == 0
assert virtual() - before < 32 << 20, (before, virtual())
""")

    def test_delayed_work_of_the_parent_runs_in_the_parent(self, run: Run) -> None:
        """A pending copy completes in the parent. The child sees the bytes from before the copy."""
        run(
            """
device = torch.full((1 << 20,), 7.0, device="emu")
host = torch_uvm.memory.full((1 << 20,), 3.0, device="cpu")
host.copy_(device, non_blocking=True)

def body():
    assert host.unique().tolist() in ([3.0], [7.0])

assert in_child(body) == 0
torch.emu.synchronize()
assert host.sum().item() == 7.0 * (1 << 20)
""",
            env={"TORCH_UVM_CONF": "emulated_schedule_seed:3"},
        )

    def test_other_programs_start(self, run: Run) -> None:
        run("""
import subprocess
data = torch_uvm.memory.ones(8 << 20, device="cpu")
for preexec in (None, lambda: None):  # vfork, fork
    command = [sys.executable, "-c", "print(6 * 7)"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=preexec)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\\n", ""), done
assert os.system("true") == 0
assert data.sum().item() == 8 << 20
""")


class TestDataLoader:
    def test_two_forked_workers_read_a_managed_dataset(self, run: Run) -> None:
        """64 MiB, half of them moved from the device. Workers allocate ordinary memory."""
        run("""
from torch.utils.data import DataLoader, Dataset
rows, columns = 64, 1 << 17

def filled(tensor):
    return tensor.copy_(torch.arange(float(rows))[:, None].expand(-1, columns))

alive = torch.ones(16 << 20, device="emu")
made = filled(torch_uvm.memory.empty(rows, columns, device="cpu"))
moved = torch_uvm.to(filled(torch.empty(rows, columns, device="emu")), "cpu")
assert made.nbytes + moved.nbytes == 64 << 20
assert torch_uvm.is_managed(made) and torch_uvm.is_managed(moved)

class Rows(Dataset):
    def __len__(self):
        return rows

    def __getitem__(self, index):
        new = torch_uvm.memory.ones(1 << 19, device="cpu")
        doubled = made[index] * 2
        assert not torch_uvm.is_managed(new) and not torch_uvm.is_managed(doubled)
        return made[index], moved[index], os.getpid()

loader = DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork")
workers = set()
for number, (a, b, pids) in enumerate(loader):
    expected = torch.arange(8.0 * number, 8.0 * number + 8)
    assert a.shape == b.shape == (8, columns)
    assert torch.equal(a, expected[:, None].expand(-1, columns)) and torch.equal(a, b)
    assert not torch_uvm.is_managed(a)
    assert torch.equal(a.to("emu").cpu(), a)
    workers.update(pids.tolist())
assert number == 7 and len(workers) == 2 and os.getpid() not in workers
assert alive.sum().item() == 16 << 20
""")

    def test_dataset_under_the_devices_label_fails_by_name(self, run: Run) -> None:
        run("""
from torch.utils.data import DataLoader, TensorDataset
data = torch.ones(64, 1 << 10, device="emu")
loader = DataLoader(TensorDataset(data), batch_size=8, num_workers=1, multiprocessing_context="fork")
with raises(RuntimeError, "forked process") as caught:
    next(iter(loader))
assert "DataLoader worker" in str(caught.exception), caught.exception
""")
