"""Interrupted training under a budget: out of memory, full disk, Ctrl-C, forks, exits, a killed child.

Each process trains under a budget and repeats an interrupted step from the state before it, like a script
with checkpoints. It must end with the bytes of an undisturbed run. `make faults` tests more seeds.
"""

from __future__ import annotations

import os

import pytest
from _faults import LONG
from _interruptions import PRELUDE
from _spawn import Run, Spawn

SEEDS = range(12) if LONG else [0]


@pytest.fixture(name="run")
def run_after_the_prelude(spawn: Spawn) -> Run:
    return spawn.after(PRELUDE)


class TestMemory:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_host_runs_out_of_memory_during_a_step(self, run: Run, seed: int) -> None:
        """The address space ends at a random point. Every larger request is refused, also in Python and
        PyTorch."""
        done = run(f"""
choose = random.Random({seed})
wanted = alone(4)
training = under_a_budget()
refused = 0
state = training.state()
for number in range(4):
    for _ in range(6):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + choose.randrange(0, 12 * MIB), hard))
        hog = []
        try:
            with contextlib.suppress(MemoryError):
                while choose.random() < 0.5:
                    hog.append(bytearray(choose.randrange(64 << 10, 2 * MIB)))  # may come from caches
            training.step(number)
            ended = True
        except (MemoryError, RuntimeError):
            ended = False
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
            del hog
        check()
        if ended:
            break
        training.load(state)
    else:
        training.step(number)
    state = training.state()
assert same(state, wanted)
print(refused)
""")
        assert int(done.stdout.split()[-1]) >= 0

    @pytest.mark.parametrize("refused", ["limit", "runtime"])
    def test_pinned_memory_is_refused(self, run: Run, refused: str) -> None:
        """The engine cannot evict: errors name the missed budget, and no byte is lost."""
        run(f"""
torch_uvm.enable(budget=8 * MIB)
if {refused!r} == "limit":
    torch_uvm.set_host_limit(2 * MIB)
kept = []
for number in range(24):
    if {refused!r} == "runtime":
        for nth in range(1, 65):
            _C.emu_fail_call("allocate_pinned", nth)
    try:
        kept.append((torch.full((MIB // 4,), float(number), device="emu"), number))
    except torch.OutOfMemoryError as error:
        assert "budget" in str(error), error
        break
    finally:
        _C.emu_clear_failures()
else:
    raise AssertionError("24 MiB where 8 MiB and 2 MiB fit")
assert 7 <= len(kept) <= 11, len(kept)
for x, number in kept:
    assert (x.cpu() == number).all()
check()
torch_uvm.set_host_limit("none")
for number in range(len(kept), 24):
    kept.append((torch.full((MIB // 4,), float(number), device="emu"), number))
for x, number in kept:
    assert (x.cpu() == number).all()
check()
""")


class TestDisk:
    @pytest.mark.parametrize("kind", ["allocations", "accesses"])
    def test_a_recording_on_a_full_disk(self, run: Run, kind: str) -> None:
        """Training continues. The end of the recording raises, and the file has the rows that fitted."""
        run(f"""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
sizes = {[0, 1, 100, 5000, 9000, 20_000] if LONG else [1, 9000]}
steps = 10
wanted = alone(steps * len(sizes))
training = under_a_budget()
for number, most in enumerate(sizes):
    file = f"recording {{most}}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    recording = torch_uvm.record_{kind}(file)
    for step in range(steps):
        training.step(number * steps + step)
    with unittest.TestCase().assertRaisesRegex(RuntimeError, file) as caught:
        recording.stop()
    assert "File too large" in str(caught.exception), caught.exception
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert os.path.getsize(file) <= most
    with torch_uvm.record_{kind}(file):  # the disk has room again
        torch.ones(MIB, device="emu").add_(1)
    assert os.path.getsize(file) > 0
assert same(training.state(), wanted)
check()
""")


class TestSignals:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("optimizer", ["in_place", "deferred"])
    def test_ctrl_c_at_random_moments(self, run: Run, optimizer: str, seed: int) -> None:
        run(f"""
choose = random.Random({seed})
wanted = alone(6)
training = under_a_budget({optimizer!r})
state = training.state()
began = time.perf_counter()
training.step(0)
long = time.perf_counter() - began
training.load(state)
interrupted = 0
signal.signal(signal.SIGALRM, signal.default_int_handler)  # the same as Ctrl-C

def interrupted_step(number):
    global interrupted
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-4, 1.5 * long))
        training.step(number)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return False
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    interrupted += 1
    # PyTorch restores the grad mode in Python code. Ctrl-C there leaves it off (test_interrupted_calls.py).
    torch.set_grad_enabled(True)
    return True

for number in range(6):
    for attempt in range(8):
        if not interrupted_step(number):
            break
        training.load(state)
        check()
    else:
        training.step(number)
    state = training.state()
assert same(state, wanted)
while interrupted == 0:  # the step that measured `long` may have been slow
    long /= 2
    interrupted_step(0)
    training.load(state)  # runs the updates that the step has deferred
check()
assert _C.pending_updates() == 0
""")

    @pytest.mark.parametrize("seed", SEEDS)
    def test_forks_at_random_moments(self, run: Run, seed: int) -> None:
        """Children read host tensors and exit. The training is not affected."""
        run(f"""
choose = random.Random({seed})
wanted = alone(6)
host = torch_uvm.memory.full((MIB,), 3.0, device="cpu")
training = under_a_budget()
children = []
stop = threading.Event()

def fork_now_and_then():
    while not stop.is_set() and len(children) < 20:
        stop.wait(choose.uniform(0.0, 0.02))
        child = os.fork()
        if child == 0:
            right = host.data_ptr() != 0 and all(value == 3.0 for value in host[::4096].tolist())
            try:
                torch.ones(8, device="emu")
            except RuntimeError as error:
                os._exit(0 if right and "forked process" in str(error) else 1)
            os._exit(2)
        children.append(child)

forking = threading.Thread(target=fork_now_and_then)
forking.start()
for number in range(6):
    training.step(number)
stop.set()
forking.join()
statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert set(statuses) == {{0}}, statuses
assert same(training.state(), wanted)
check()
""")


class TestEnds:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("optimizer", ["deferred", "in_place"][: 2 if LONG else 1])
    def test_the_interpreter_exits_during_a_step(self, run: Run, optimizer: str, seed: int) -> None:
        """With live tensors, a training thread, delayed copies and pending updates."""
        done = run(
            f"""
import logging
logging.getLogger("torch_uvm").setLevel(logging.ERROR)  # a foreach optimizer exceeds 8 MiB and logs a warning
training = under_a_budget({optimizer!r})
pinned = [torch.ones(MIB // 4).pin_memory() for _ in range(4)]
pending = [x.to("emu", non_blocking=True) for x in pinned]
other = Training("emu")
def work():
    for number in range(5):
        other.step(number)
threading.Thread(target=work).start()
training.step(0)
sys.modules["kept"] = (training, pending)
graph = training.model(inputs[0].to("emu")).sum()
""",
            env={"TORCH_UVM_DEVICE": "emu", "TORCH_UVM_CONF": f"emulated_schedule_seed:{seed}"},
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_child_with_shared_memory_and_aliases_is_killed(self, run: Run) -> None:
        """A forked child. The parent continues, and nothing is left in /dev/shm."""
        before = set(os.listdir("/dev/shm"))
        run("""
import torch.multiprocessing as processes

def hold(shared, ready):
    shared.add_(1.0)
    ours = [torch.ones(MIB // 4).share_memory_() for _ in range(4)]
    ready.send(ours[0])
    ready.recv()  # blocks forever

def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL

if __name__ == "__main__":
    wanted = alone(3)
    training = under_a_budget()
    host = torch_uvm.memory.full((MIB,), 3.0, device="cpu")
    moved = torch_uvm.to(torch.full((MIB,), 4.0, device="emu"), "cpu")
    context = processes.get_context("fork")
    shared = torch.zeros(MIB).share_memory_()
    for number in range(3):
        mine, theirs = context.Pipe()
        child = context.Process(target=hold, args=(shared, theirs))
        child.start()
        received = mine.recv()
        assert received.sum().item() == MIB // 4
        kill(child)
        assert (received == 1.0).all() and (shared == number + 1.0).all()
        assert (host == 3.0).all() and (moved == 4.0).all()
        del received
    child = os.fork()
    if child == 0:  # with inherited copies, and aliases that were sent to it
        host.zero_(), moved.zero_()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (host == 3.0).all() and (moved == 4.0).all()
    for number in range(3):
        training.step(number)
    assert same(training.state(), wanted)
    check()
""")
        left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")}
        assert left == set(), left
