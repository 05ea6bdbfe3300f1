"""The GIL policy of the bindings: while a binding waits for a lock of torch_uvm, other Python threads run."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from _spawn import Spawn

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("csrc/python/*.cpp"), *ROOT.glob("tests/cpp/doubles/*.cpp")])
POLICIES = {"no_gil", "no_gil_inside", "keeps_gil"}

# --- by the source --------------------------------------------------------------------------------


def arguments(source: str, opening: int) -> list[str]:
    """The arguments of the call whose bracket opens there, without splitting nested calls."""
    found = [""]
    depth, quoted = 0, False
    for index in range(opening + 1, len(source)):
        character = source[index]
        if character == '"' and source[index - 1] != "\\":
            quoted = not quoted
        if not quoted:
            if character in ")]}" and depth == 0:
                return [argument.strip() for argument in found]
            depth += (character in "([{") - (character in ")]}")
            if character == "," and depth == 0:
                found.append("")
                continue
        found[-1] += character
    raise AssertionError(f"a call without an end: {source[opening - 40 : opening + 40]}")


def called(source: str, value: str) -> list[str]:
    """Definitions, in the same file, of the functions that a binding's argument names."""
    names = set(re.findall(r"&(\w+)$|\b(\w+)[(<]", value))
    found = [
        re.search(rf"\b{name}\([^;{{]*\{{\n.*?\n\}}\n", source, re.DOTALL)
        for pair in names
        for name in pair
        if name
    ]
    return [each[0] for each in found if each is not None]


def fault(source: str, kind: str, values: list[str]) -> str | None:
    """The fault in the GIL policy of a binding, or None. The binding is a `kind` with these arguments."""
    named = POLICIES.intersection(values)
    if kind.startswith("def_property"):  # a property's extras do not apply to its functions
        if named == {"keeps_gil"} or (not named and any(value.startswith("unlocked(") for value in values)):
            return None
        return "a property names keeps_gil, or has functions from unlocked()"
    if len(named) != 1:
        return f"names {sorted(named)}; accepted: one of {sorted(POLICIES)}"
    if named == {"no_gil"} and values[0].startswith("py::init("):
        return "pybind11 registers what a function of py::init() makes, in that call: no_gil_inside"
    if named == {"no_gil_inside"}:
        texts = [text for value in values for text in called(source, value)]
        if not any("without_gil(" in text for text in (*values, *texts)):
            return "names no_gil_inside, and does not call without_gil"
    return None


def bindings(source: str) -> list[tuple[str, str, str | None]]:
    """Kind, name in Python ("" for a constructor) and fault of each binding."""
    found = []
    for call in re.finditer(r"\.(def(?:_static|_readonly|_readwrite|_property\w*)?)\(", source):
        values = arguments(source, call.end() - 1)
        quoted = re.fullmatch(r'"(\w+)"', values[0])
        found.append((call[1], quoted[1] if quoted else "", fault(source, call[1], values)))
    return found


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    import torch_uvm._C

    return torch_uvm._C


def functions(thing: ModuleType | type) -> set[str]:
    """Names of the callables of a module or class, and of its classes."""
    names: set[str] = set()
    for name, value in vars(thing).items():
        if isinstance(value, (ModuleType, type)) and "torch_uvm" in (
            getattr(value, "__module__", "") or value.__name__
        ):
            if getattr(value, "__entries", None) is None:  # pybind11 generates an enumeration's functions
                names |= functions(value)
        elif not name.startswith("_") and (callable(value) or isinstance(value, property)):
            names.add(name)
    return names


def test_each_binding_names_its_gil_policy() -> None:
    faults = [
        f"{file.name}: {kind} {name}: {wrong}"
        for file in FILES
        for kind, name, wrong in bindings(file.read_text())
        if wrong is not None
    ]
    assert faults == []


def test_the_check_sees_every_binding(extension: ModuleType) -> None:
    seen = {name for file in FILES for _, name, _ in bindings(file.read_text())}
    missing = functions(extension) - seen
    assert missing == set()
    assert len(seen) > 120


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('module.def("f", &f, no_gil);', None),
        ('module.def("f", [] { return g(1, 2); }, keeps_gil);', None),
        ('module.def("f", &f);', "names []"),
        ('module.def("f", [] { h(no_gil); });', "names []"),
        ('module.def("f", &f, no_gil, keeps_gil);', "names ['keeps_gil', 'no_gil']"),
        ('int f(int a) {\n  return without_gil([a] { return a; });\n}\n.def("f", &f, no_gil_inside)', None),
        ('int f() {\n  return 1;\n}\n.def("f", &f, no_gil_inside)', "does not call without_gil"),
        ('.def_property_readonly("f", unlocked(&f))', None),
        ('.def_property_readonly("f", &f, no_gil)', "a property"),
        ('.def(py::init<int>(), arg("a") = 1)', "names []"),
        (".def(py::init<int>(), no_gil)", None),
        (".def(py::init([] { return g(); }), no_gil)", "no_gil_inside"),
    ],
)
def test_the_check_reports_faults(source: str, wrong: str | None) -> None:
    [(_, _, found)] = bindings(source)
    assert found is None if wrong is None else wrong in str(found)


# --- by running them ------------------------------------------------------------------------------

# A held device performs no copies. One thread waits for such a copy while it holds locks of torch_uvm. Other
# threads then call bindings that need these locks. The switch interval is longer than the test, so a thread
# keeps the GIL until it releases it. A binding that waits with the GIL stops this program, and the dump names
# the binding.
PROGRAM = """
import faulthandler, sys, threading
import torch, torch_uvm
from torch_uvm import _C

MIB = 1 << 20
torch_uvm.enable(budget=WAITS == "engine" and 16 * MIB or None)
y = torch.ones(16, device="emu")  # in a segment of small blocks
x = torch.ones(8 * MIB // 4, device="emu")
capsule = _C.dlpack_export(y, 0, True, False)
arena = torch_uvm.allocators.arena("1MiB")
torch.emu.synchronize()

def engine():  # the engine evicts x and waits for that
    _C.request_budget(0, str(4 * MIB))

def allocator():  # frees a segment, which waits for queued work
    _C.empty_cache()

CALLS = {
    "empty_strided": lambda: _C.empty_strided([MIB], [1], torch.float32, x.device),
    "memory_stats": lambda: _C.memory_stats(None),
    "memory_snapshot": lambda: _C.memory_snapshot(),
    "reset_peak_memory_stats": lambda: _C.reset_peak_memory_stats(None),
    "reset_accumulated_memory_stats": lambda: _C.reset_accumulated_memory_stats(None),
    "check_allocator": lambda: _C.check_allocator(),
    "block_of": lambda: _C.block_of(y),
    "residency": lambda: _C.residency([y]),
    "emu_residency": lambda: _C.emu_residency(y),
    "process_allocator": lambda: _C.process_allocator().figures(),
    "residency_stats": lambda: _C.residency_stats(),
    "budget": lambda: _C.budget(0),
    "requested_budget": lambda: _C.requested_budget(0),
    "mark_step": lambda: _C.mark_step(),
    "materialise": lambda: _C.materialise(y),
    "dlpack_export": lambda: _C.dlpack_export(y, 0, True, False),
    "dlpack_import": lambda: _C.dlpack_import(capsule, y.device, False),
    "device_properties": lambda: _C.device_properties(0),
    "check_residency": lambda: _C.check_residency(),
    # Holds the lock of the options while it waits for the allocator's lock.
    "set_limit": lambda: _C.set_limit(None),
    "get_limit": lambda: _C.get_limit(),
    "describe_options": lambda: _C.describe_options(),
    "backend": lambda: _C.backend(),
    "managed_bytes": lambda: _C.managed_bytes(),
    "set_budget": lambda: _C.set_budget(0, None),
}

def begin(name, call):
    begun = threading.Event()
    def work():
        begun.set()
        call()
    thread = threading.Thread(target=work, name=name)
    thread.start()
    begun.wait()
    return thread

faulthandler.dump_traceback_later(60, exit=True)  # after 60 s a binding waits with the GIL
sys.setswitchinterval(1e6)
host = torch.ones(8 * MIB // 4).pin_memory()
_C.emu_hold_device(0)
if WAITS == "allocator":
    x.copy_(host, non_blocking=True)
    del x
    x = y
threads = [begin(WAITS, globals()[WAITS])]
_C.emu_await_waiter()
for name, call in CALLS.items():
    threads.append(begin(name, call))
waiting = [thread.name for thread in threads if thread.is_alive()]
assert WAITS in waiting, waiting
_C.emu_release_device(0)
for thread in threads:
    thread.join()
faulthandler.cancel_dump_traceback_later()
print(" ".join(waiting))
"""


@pytest.mark.parametrize("waits", ["engine", "allocator"])
def test_other_threads_run_while_a_binding_waits_for_a_lock(spawn: Spawn, waits: str) -> None:
    done = spawn(f"WAITS = {waits!r}\n" + PROGRAM, timeout=120)
    assert waits in done.stdout.split(), done.stdout
