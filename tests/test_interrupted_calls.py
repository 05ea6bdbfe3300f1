"""Ctrl-C after the Nth call, for each N: the state is unchanged afterwards, and the next call succeeds.

Python checks for signals at the begin of a function, after a call of a C function, and at the end of a loop's
iteration. A profile function covers the first two: it raises KeyboardInterrupt there. `make faults` tests all
N.
"""

from __future__ import annotations

import pytest
from _faults import LONG
from _interruptions import PRELUDE
from _spawn import Run, Spawn

INTERRUPT = """
class Interrupt:
    # Raises after the nth call, counted in functions of files with these endings.
    def __init__(self, nth, files=("",)):
        self.nth, self.files, self.seen, self.where = nth, files, 0, None

    def __call__(self, frame, event, arg):
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(self.files):
            self.seen += 1
            if self.seen == self.nth:
                sys.setprofile(None)
                self.where = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
                raise KeyboardInterrupt

    def during(self, call):
        # Returns whether there was such a call.
        try:
            sys.setprofile(self)
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return self.where is not None
"""

STEP = """
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

torch_uvm.disable()
plain = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
wanted = alone(1)
training = under_a_budget(OPTIMIZER)
state = training.state()
# PyTorch's own functions, which restore the grad mode in Python code.
PYTORCHS = ("torch/_dynamo/decorators.py", "torch/autograd/grad_mode.py", "torch/optim/optimizer.py")

def operators():
    stats = torch_uvm.stats()
    return stats["plan_hits"] + stats["plan_misses"]

nth = 1
while True:
    training.load(state)
    interrupt = Interrupt(nth, FILES)
    interrupted = interrupt.during(lambda: training.step(0))
    if not torch.is_grad_enabled():
        assert interrupt.where[0].endswith(PYTORCHS), interrupt.where
        torch.set_grad_enabled(True)
    assert _get_current_dispatch_mode_stack() == [], interrupt.where
    assert torch._C._len_torch_function_stack() == 0, interrupt.where
    assert torch_uvm.is_enabled(), interrupt.where
    if OPTIMIZER == "deferred":  # otherwise the engine may be idle
        before = operators()
        training.model[0].weight.detach() + 1
        assert operators() > before, interrupt.where
    if not interrupted:
        break
    nth += EVERY
assert nth > 100, nth
assert same(training.state(), wanted)
check()
assert _C.pending_updates() == 0
"""

DEFERRED = ("_patches/deferred_updates.py", "_patches/optimizer_steps.py", "_python_dispatch.py")


@pytest.fixture(name="run")
def run_interrupted(spawn: Spawn) -> Run:
    return spawn.after(PRELUDE + INTERRUPT)


@pytest.mark.parametrize(
    ("optimizer", "files", "every"),
    [
        ("deferred", DEFERRED, 1 if LONG else 3),
        ("deferred", ("",), 1 if LONG else 29),
        ("in_place", ("",), 1 if LONG else 11),
    ],
    ids=["ours", "deferred", "in_place"],
)
def test_a_step(run: Run, optimizer: str, files: tuple[str, ...], every: int) -> None:
    """An interrupted step leaves no pending operator, no unobserved operator, and no mode."""
    chosen = f"OPTIMIZER, FILES, EVERY = {optimizer!r}, {files!r}, {every}\n"
    run(chosen + STEP)


def test_scopes(run: Run) -> None:
    """An interrupted scope ends with the exception, which is not lost."""
    run("""
torch_uvm.enable(budget=None)
arena = torch_uvm.allocators.arena("1MiB")
x = torch.ones(MIB // 4, device="emu")
lost = []
sys.unraisablehook = lost.append

def scopes():
    with torch_uvm.disabled():
        with torch_uvm.enabled():
            pass
        with torch_uvm.enabled(), arena:
            torch.ones(8, device="emu")
        with torch_uvm.resident(x):
            pass

nth = 1
while True:
    interrupt = Interrupt(nth)
    interrupted = interrupt.during(scopes)
    assert torch_uvm.is_enabled(), interrupt.where
    assert lost == [], interrupt.where
    if not interrupted:
        break
    nth += 1
    # The first whole scope also installs what budgets need, in fewer calls than this.
    assert nth < 2000, interrupt.where
assert nth > 50, nth
scopes()
check()
""")


def test_resident(run: Run) -> None:
    """An interrupted scope leaves nothing pinned."""
    run("""
import gc

torch_uvm.enable(budget=8 * MIB)
x = torch.ones(MIB // 2, device="emu")

def scope():
    with torch_uvm.resident(x):
        x.add_(1)

nth = 1
while True:
    interrupt = Interrupt(nth)
    interrupted = interrupt.during(scope)
    gc.collect()  # what the exception's traceback holds
    _C.evict_after_operators(True)
    x.sum()
    _C.evict_after_operators(False)
    assert torch_uvm.residency(x) == {torch.device("cpu"): x.nbytes}, interrupt.where
    if not interrupted:
        break
    nth += 1
assert nth > 50, nth
check()
""")


@pytest.mark.parametrize("kind", ["accesses", "allocations"])
def test_the_end_of_a_recording(run: Run, kind: str) -> None:
    """The next recording starts, and replaces one that ended only in part."""
    run(f"""
from unittest import mock

torch_uvm.enable(budget=8 * MIB)
record = torch_uvm.tools.record_{kind}
recording = record("first")
interrupted = mock.patch.object(type(recording), "_end", side_effect=KeyboardInterrupt)
with interrupted, contextlib.suppress(KeyboardInterrupt):
    recording.stop()
with record("second"):
    torch.ones(MIB // 4, device="emu").add_(1)
assert os.path.getsize("second") > 0
""")


def test_enable(run: Run) -> None:
    """The next call installs everything, exactly once."""
    run(
        """
import importlib
from unittest import mock

from torch_uvm._patches import pointer_escapes

adam = importlib.import_module("torch.optim.adam")  # torch.optim hides this module's name

def depth(call):
    count = 0
    while hasattr(call, "__wrapped__"):
        call, count = call.__wrapped__, count + 1
    return count

def watched():
    # How often each is wrapped. Functions in C stay the same objects, so what their wrappers call is counted.
    seen = []
    torch.empty(1).data_ptr()  # its wrapper is in C; one that wrapped itself would not return
    with mock.patch.object(pointer_escapes, "_gives_out", lambda x: seen.append(type(x))):
        torch.empty(1).numpy()
        torch.empty(1).untyped_storage().data_ptr()
    given_out = map(seen.count, (torch.Tensor, torch.UntypedStorage))
    return [depth(adam.adam), depth(torch.Tensor.__dlpack__), *given_out]

def enable():
    torch_uvm.enable(budget=8 * MIB, moves="alias", optimizer="deferred", host_tensors=True)

def after_the(nth):
    # In a child, where nothing is installed yet.
    before = watched()
    interrupted = Interrupt(nth, ("",)).during(enable)
    enable()
    assert watched() == [each + 1 for each in before], (watched(), before)
    assert torch_uvm.is_enabled() and _C.requested_budget(0) == "8MiB"
    return interrupted

nth = 1
while True:
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if after_the(nth) else 42)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            print(f"after call {nth}", file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 42:
        break
    assert status == 0
    nth += EVERY
assert nth > 100, nth
""".replace("EVERY", "1" if LONG else "11")
    )
