"""torch_uvm/_C.pyi and the extension declare the same names."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

STUB = Path(__file__).resolve().parent.parent / "torch_uvm" / "_C.pyi"


def stubbed(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The declarations in a stub's module or class body, by name."""
    found: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = statement
    return found


def public(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    import torch_uvm._C

    return torch_uvm._C


@pytest.fixture(scope="module")
def declared() -> dict[str, ast.stmt]:
    return stubbed(ast.parse(STUB.read_text()).body)


def test_module_has_exactly_the_stubs_names(extension: ModuleType, declared: dict[str, ast.stmt]) -> None:
    assert public(extension) == set(declared)


def test_classes_have_the_stubs_members(extension: ModuleType, declared: dict[str, ast.stmt]) -> None:
    for name, statement in declared.items():
        if isinstance(statement, ast.ClassDef):
            thing = getattr(extension, name)
            members = {member for member in stubbed(statement.body) if not member.startswith("__")}
            if isinstance(thing, ModuleType):  # a submodule for tests: the stub declares only its main names
                assert members <= public(thing), name
            else:
                assert public(thing) == members, name


def test_functions_take_the_stubs_arguments(extension: ModuleType, declared: dict[str, ast.stmt]) -> None:
    """pybind11 writes the signature into the first line of the docstring."""
    for name, statement in declared.items():
        if isinstance(statement, ast.FunctionDef):
            signature = (getattr(extension, name).__doc__ or "").split("\n")[0]
            assert signature.startswith(f"{name}("), f"{name} has no signature: {signature!r}"
            arguments = signature[len(name) + 1 : signature.rindex(")")]
            for argument in (*statement.args.args, *statement.args.kwonlyargs):
                assert f"{argument.arg}:" in arguments, f"{name} lacks {argument.arg}: {signature}"
