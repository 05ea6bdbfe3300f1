"""The CPU suite's tests with CUDA as the accelerator, so that both accelerators meet the same
specification.

A file in gpu/ calls `run_on_cuda("test_moves", globals())` and gets that module's tests, recompiled with the
emulated accelerator's name replaced by CUDA's, in code and in strings. Tests are left out if they need
features of the emulator alone: its counters, its delayed schedules, its configuration.

The tests assume that a kernel is done when its call returns, because the host reads its results. They run
with CUDA_LAUNCH_BLOCKING=1. The tests of waits run without it (see gpu/conftest.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts

FROM_CPU_SUITE = "FROM_CPU_SUITE"  # marks a module of such tests
TESTS = Path(__file__).resolve().parent
_NAME = re.compile(r"\bemu\b")
_EMULATOR_ONLY = re.compile(
    r"\b_?emulated_|\bemu_|TORCH_UVM_DEVICE|\bemulated\.|\bpretend_not_concurrent\b|\bacross_seeds\b"
)
_Definition = (ast.FunctionDef, ast.ClassDef)


class _Exchange(ast.NodeTransformer):
    """Replaces the emulator's name by CUDA's."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            node.value = _NAME.sub("cuda", node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "emu":
            node.attr = "cuda"
        return node


def _names(node: ast.AST) -> set[str]:
    """The names that a definition refers to. A test refers to its fixtures by its parameters."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return found | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def _needs_the_emulator(node: ast.AST, source: str, known: set[str]) -> bool:
    return bool(_EMULATOR_ONLY.search(ast.get_source_segment(source, node) or "")) or bool(
        _names(node) & known
    )


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, _Definition):
        return {node.name}
    if isinstance(node, ast.ImportFrom):  # modules `_emulated_x` hold helpers that only work on the emulator
        return {alias.asname or alias.name for alias in node.names}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _is_test(name: str) -> bool:
    return name.startswith(("test_", "Test"))


def _leave_out(tree: ast.Module, source: str) -> list[str]:
    """Removes definitions that need the emulator. Returns the names of the removed tests."""
    known: set[str] = set()
    while True:  # helpers first, transitively
        more = {
            name
            for node in tree.body
            for name in _defined(node)
            if not _is_test(name) and name not in known and _needs_the_emulator(node, source, known)
        }
        if not more:
            break
        known |= more
    gone: list[str] = []
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_test(node.name):
            _leave_out_methods(node, source, known, gone)
            kept.append(node)
        elif _defined(node) and _needs_the_emulator(node, source, known):
            gone += [name for name in _defined(node) if _is_test(name)]
        else:
            kept.append(node)
    tree.body = kept
    return gone


def _leave_out_methods(node: ast.ClassDef, source: str, known: set[str], gone: list[str]) -> None:
    helpers: set[str] = set()
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not _is_test(method.name):
            if _needs_the_emulator(method, source, known):
                helpers.add(method.name)
    kept: list[ast.stmt] = []
    for method in node.body:
        used = {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)}
        if isinstance(method, ast.FunctionDef) and (
            used & helpers or _needs_the_emulator(method, source, known | helpers)
        ):
            gone.append(f"{node.name}::{method.name}")
        else:
            kept.append(method)
    node.body = kept or [ast.Pass()]


def _exclude(tree: ast.Module, names: Iterable[str], module: str) -> None:
    for name in names:
        path = name.split("::")
        body = tree.body
        for part in path[:-1]:
            body = next((n.body for n in body if isinstance(n, ast.ClassDef) and n.name == part), [])
        found = [n for n in body if isinstance(n, _Definition) and n.name == path[-1]]
        if not found:
            raise LookupError(f"{module} has no {name}, which was to be left out")
        body.remove(found[0])
        if not body:
            body.append(ast.Pass())


def run_on_cuda(
    module: str, namespace: dict[str, Any], *, without: Mapping[str, str] | None = None
) -> list[str]:
    """Fills `namespace` with the tests of tests/<module>.py, on CUDA.

    Args:
        without: tests that do not hold on CUDA ("TestA::test_b"), each with the reason.

    Returns:
        the tests that were left out because they need the emulator
    """
    path = TESTS / f"{module}.py"
    source = path.read_text()
    tree = ast.parse(source)
    _exclude(tree, without or {}, module)
    gone = _leave_out(tree, source)
    _Exchange().visit(tree)
    ast.fix_missing_locations(tree)
    rewrite_asserts(tree, source.encode(), str(path))
    own = {"__name__": namespace["__name__"], "__file__": str(path)}
    exec(compile(tree, str(path), "exec", dont_inherit=True), own)
    namespace[FROM_CPU_SUITE] = True
    namespace.update({name: value for name, value in own.items() if not name.startswith("__")})
    return gone
