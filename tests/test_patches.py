"""The attributes that torch_uvm replaces in PyTorch, compared with the tables of
torch_uvm/_patches/README.md."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from _spawn import Spawn

from torch_uvm._patches.import_hooks import when_imported
from torch_uvm._patches.replace import replace_once

README = Path(__file__).resolve().parent.parent / "torch_uvm" / "_patches" / "README.md"

COMPILER = """
import torch._dynamo.output_graph, torch._inductor.compile_fx, torch._inductor.output_code
import torch.nn.attention.flex_attention
"""

# Functions, properties and classes of all modules and classes of torch. New attributes do not count as
# replacements: modules that are imported later, counters and caches.
LOOK = """
import ctypes, inspect, sys, types, warnings
warnings.simplefilter("ignore")
import torch

def of_torch(name):
    return (name or "").split(".")[0] == "torch"

def owners():
    for module in [it for name, it in list(sys.modules.items()) if of_torch(name)]:
        if isinstance(module, types.ModuleType):
            yield module
            yield from (it for it in list(vars(module).values())
                        if isinstance(it, type) and of_torch(it.__module__))

def name_of(owner):
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"

def counts(owner, value):
    if inspect.ismodule(value):
        return not of_torch(value.__name__)
    member = isinstance(owner, type) and isinstance(value, owner)  # a member of an enumeration
    return callable(value) or isinstance(value, property) or member

# What a function does may be replaced in a function that stays the same object. IN_C: where CPython has
# the definition of a function in C, in pointers from the object's begin.
IN_C = {types.MethodDescriptorType: 5, types.BuiltinFunctionType: 2}

def function_of(value):
    return value.fget if isinstance(value, property) else value

def body(value):
    function = function_of(value)
    if type(function) in IN_C:
        return ctypes.c_void_p.from_address(id(function) + 8 * IN_C[type(function)]).value
    return function.__code__ if type(function) is types.FunctionType else None

def look():
    return {id(owner): (owner, {name: (value, body(value)) for name, value in vars(owner).items()})
            for owner in owners()}

def replaced(before, after):
    known = {}  # the names in the table: a function has several places
    for it, when in TABLE:
        if here(when) and inspect.isroutine(function := function_of(getattr(*place(it), None))):
            known[id(function)] = resolve(it)
    found = set()
    for key, (owner, now) in after.items():
        then = before[key][1] if key in before else now
        found |= {f"{name_of(owner)}.{it}" for it in then.keys() - now.keys()}
        for it, (value, body) in now.items():
            if not (it in then and then[it][0] is value) and counts(owner, value):
                found.add(f"{name_of(owner)}.{it}")
            elif it in then and then[it][1] is not body and then[it][1] != body:
                found.add(known.get(id(function_of(value)), f"{name_of(owner)}.{it}"))
    return found

def place(path):
    head, _, attribute = path.rpartition(".")
    module = head
    while module not in sys.modules:
        module = module.rpartition(".")[0]
    owner = sys.modules[module]
    for part in head.removeprefix(module).strip(".").split("."):
        owner = getattr(owner, part) if part else owner
    return owner, attribute

def resolve(path):
    owner, attribute = place(path)
    return f"{name_of(owner)}.{attribute}"

def here(when):
    from torch_uvm import _C
    backend = _C.backend()
    named = ("CUDA" not in when or backend == "cuda") and ("emu" not in when or backend == "emulated")
    since = when.partition(", torch ")[2].removesuffix(" and later")
    return named and (not since or torch.__version__ >= since)

def expect(*begins, then):
    global before
    then()
    after = look()
    wanted = {resolve(it) for it, when in TABLE if when.startswith(begins) and here(when)}
    found = replaced(before, after)
    assert found == wanted, (begins, "not in the table:", found - wanted, "not replaced:", wanted - found)
    before = after

def import_it():
    import torch_uvm

before = look()
"""


def table() -> list[tuple[str, str]]:
    """(attribute, when) for each row of the tables of replacements."""
    found = []
    for line in README.read_text().partition("## Registered")[0].splitlines():
        if line.startswith("| `"):
            attributes, when = line.strip("| ").split(" | ")[:2]
            found += [(attribute, when) for attribute in re.findall(r"`([^`]+)`", attributes)]
    return found


def test_the_table_is_read() -> None:
    assert ("torch.Tensor.to", "import") in table()
    assert len(table()) > 50
    begins = ("import", "first managed tensor", "first budget", "`moves=")
    assert [when for _, when in table() if not when.startswith(begins)] == []


def without_the_compiler() -> str:
    plain = [row for row in table() if "import of" not in row[1]]
    return f"TABLE = {plain!r}\n{LOOK}"


def test_import_adds_a_keyword_to_one_method(spawn: Spawn) -> None:
    code = """
expect("import", then=import_it)
assert not any("_dynamo.output_graph" in name for name in sys.modules)
"""
    spawn(without_the_compiler() + code)


def test_each_replacement_is_in_the_table(spawn: Spawn) -> None:
    """The compiler is imported before torch_uvm, so that no replacement is deferred."""
    code = COMPILER + f"TABLE = {table()!r}\n{LOOK}"
    spawn(
        code
        + """
expect("import", then=import_it)
import torch_uvm
expect("first managed tensor", then=lambda: torch_uvm.enable(budget=None))
expect("first budget", then=lambda: torch_uvm.set_budget("auto"))
expect("`moves=", then=lambda: torch_uvm.enable(moves="alias"))
assert not replaced(before, look())
torch_uvm.disable()
assert not replaced(before, look())  # replacements wait for managed tensors
torch_uvm.enable(moves="alias", optimizer="deferred", budget="1GiB")
assert not replaced(before, look())  # replaced only once
"""
    )


@pytest.mark.parametrize(
    "first",
    [
        "torch_uvm.memory.empty(4)",
        "torch.ones(4).to('cpu', managed=True)",
        "torch_uvm.to(torch.ones(4), 'cpu', managed=True)",
        "torch_uvm.enabled().__enter__()",
        "torch_uvm.allocators.use_allocator(torch_uvm.allocators.Allocator.process()).__enter__()",
    ],
)
def test_installed_with_the_first_managed_tensor(spawn: Spawn, first: str) -> None:
    spawn(
        without_the_compiler()
        + f"""
import_it()
import torch_uvm
before = look()
expect("first managed tensor", *(["first budget"] if "__enter__" in {first!r} else []), then=lambda: {first})
"""
    )


def test_options_in_the_environment_wait_for_the_first_managed_tensor(spawn: Spawn) -> None:
    spawn(
        without_the_compiler()
        + """
expect("import", then=import_it)
import torch_uvm
expect("first managed tensor", "first budget", then=lambda: torch_uvm.memory.empty(4))
""",
        env={"TORCH_UVM_CONF": "budget:1GiB,optimizer:deferred"},
    )


SUBCLASS = """
import torch
from torch.utils.dlpack import to_dlpack
NAMES = [it.rpartition(".")[2] for it in ATTRIBUTES]
BEFORE = [(name, getattr(torch.Tensor, name)) for name in NAMES if hasattr(torch.Tensor, name)]
seen = []

class Labelled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for name, function in BEFORE:
            same = func is function if callable(function) else func == function.__get__
            if same and getattr(torch.Tensor, name) is function:
                seen.append(name)
        return super().__torch_function__(func, types, args, kwargs or {})

import torch_uvm
"""


@pytest.mark.parametrize("moves", ["copy", "alias"])
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_subclass_from_before_the_import_knows_each_function(moves: str, device: str, spawn: Spawn) -> None:
    attributes = [it for it, when in table() if it.startswith("torch.Tensor.") and "emu" not in when]
    attributes.remove("torch.Tensor.__dlpack_c_exchange_api__")
    assert len(attributes) == 7
    spawn(
        f"ATTRIBUTES = {attributes!r}\nMOVES, DEVICE = {moves!r}, {device!r}\n{SUBCLASS}"
        + """
torch_uvm.enable(budget="16MiB", moves=MOVES)
x = torch.ones(4, device=DEVICE).as_subclass(Labelled)
calls = {"to": ["emu"], "cuda": []}
for name, function in BEFORE:
    seen.clear()
    try:
        if callable(function):
            result = getattr(x, name)(*calls.get(name, []))
            assert not isinstance(result, torch.Tensor) or type(result) is Labelled, (name, type(result))
        else:
            getattr(x, name)
    except (AssertionError, AttributeError, RuntimeError, TypeError) as error:
        assert any(it in str(error) for it in ("CUDA", "NVIDIA", "numpy")), error  # no GPU; a device's tensor
    assert seen == [name], (name, seen)
seen.clear()
moved = x.to("emu", managed=True)
assert type(moved) is Labelled and "to" in seen and torch_uvm.is_managed(moved)
"""
    )


def test_functions_from_before_the_import_do_what_new_ones_do(spawn: Spawn) -> None:
    """An export by an imported `to_dlpack` pins the bytes, and kept methods do what they do on tensors."""
    spawn("""
import torch
from torch.utils.dlpack import to_dlpack
to, pointer = torch.Tensor.to, torch.UntypedStorage.data_ptr
import torch_uvm
torch_uvm.enable(budget=None)
x = torch.full((1 << 20,), 3.0, device="emu")
early = to_dlpack(x)
y = torch.full((1 << 20,), 4.0, device="emu")
torch_uvm.set_budget("16MiB")
late = to_dlpack(y)
z = torch.ones(4, device="emu")
assert to(z, "cpu", managed=True).data_ptr() == pointer(z.untyped_storage()) == z.data_ptr()
addresses = x.data_ptr(), y.data_ptr()
others = [torch.ones(1 << 20, device="emu") for _ in range(12)]
for _ in range(3):
    for other in others:
        other.add_(1)
assert (x.data_ptr(), y.data_ptr()) == addresses
assert torch_uvm.residency([x, y]) == {torch.device("emu", 0): 8 << 20}
del early, late
""")


def test_what_pytorch_has_renamed_is_off_and_the_rest_works(spawn: Spawn) -> None:
    """A torch that lacks a name gives one warning, and trains within a budget. Each name by itself."""
    names = [name for name, when in table() if "CUDA" not in when and "exchange_api" not in name]
    names = [name for name in names if not re.search(r"\bemu\b|is_emu|\._C\.", name)]
    assert len(names) > 20
    spawn(
        f"NAMES = {names!r}\n{COMPILER}import torch.distributed"
        + """
import os, pkgutil, traceback, warnings

def train(path):
    owner, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    setattr(owner, name, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch_uvm
        torch_uvm.enable(budget="8MiB", moves="alias")
        weight = torch.ones(1024, 1024, device="emu", requires_grad=True)
        optimizer = (torch.optim.Adagrad if name == "sgd" else torch.optim.SGD)([weight], lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            (torch.ones(4, 1024, device="emu") @ weight).sum().backward()
            optimizer.step()
    assert name == "sgd" or weight.sum().item() == -11 * 1024 ** 2
    title = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    said = [str(it.message) for it in caught if " has no " in str(it.message)]
    assert len(said) == 1 and f" has no {title}, which" in said[0], said

for path in NAMES:
    if (child := os.fork()) == 0:
        try:
            train(path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""
    )


class TestWhenImported:
    """Patches of modules that wait for their import."""

    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """The name of a module whose import fails while the file `broken` exists."""
        name = "imported_later"
        text = f"import os\nassert not os.path.exists({str(tmp_path / 'broken')!r})\n"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
        yield name
        sys.modules.pop(name, None)

    def test_a_search_without_an_import(self, module: str) -> None:
        seen: list[ModuleType] = []
        when_imported(module, seen.append)
        when_imported(module, seen.append)
        for _ in range(2):
            assert importlib.util.find_spec(module) is not None
        assert seen == []
        found = importlib.import_module(module)
        assert seen == [found, found]

    def test_other_threads_search_with_all_finders(self, module: str) -> None:
        when_imported(module, lambda _: None)
        finders = [*sys.meta_path]
        search = iter(sys.meta_path)
        asked = [next(search)]
        importlib.import_module(module)
        assert [*asked, *search] == finders

    def test_a_module_that_is_half_imported(
        self, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        (tmp_path / "half_imported.py").write_text("from builtins import during\nduring()\nvalue = 1\n")

        def during() -> None:
            when_imported("half_imported", lambda it: seen.append(it.value))
            assert seen == []

        monkeypatch.setattr("builtins.during", during, raising=False)
        importlib.import_module("half_imported")
        importlib.import_module(module)  # the next import of any module
        assert seen == [1]
        del sys.modules["half_imported"]

    def test_what_pytorch_has_renamed_is_left_out_with_a_warning(self, module: str) -> None:
        when_imported(module, lambda it: replace_once(it, "renamed", lambda plain: plain))
        with pytest.warns(UserWarning, match="imported_later.*renamed"):
            importlib.import_module(module)

    def test_an_import_that_fails_first(self, module: str, tmp_path: Path) -> None:
        seen: list[ModuleType] = []
        when_imported(module, seen.append)
        (tmp_path / "broken").touch()
        with pytest.raises(AssertionError):
            importlib.import_module(module)
        assert seen == []
        (tmp_path / "broken").unlink()
        found = importlib.import_module(module)
        assert seen == [found]

    def test_a_search_by_a_program(self, spawn: Spawn) -> None:
        spawn("""
import importlib.util
import torch, torch_uvm
importlib.util.find_spec("torch.nn.attention.flex_attention")
import torch.nn.attention.flex_attention as found
torch_uvm.enable()
found._validate_device(*[torch.ones(1, device="emu").requires_grad_()] * 3)
""")
