"""Rules for imports between modules of torch_uvm. Each rule is a function from files to complaints."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

# Texts of files by their path within the repository.
Files = Mapping[str, str]

PACKAGE = "torch_uvm"

#: Folders and top-level modules, lowest layer first. Each may import the layers before it. Those on one line
#: do not import each other.
LAYERS = [
    ["_util"],
    ["_patches"],
    ["_residency"],
    ["_switch"],
    ["_allocators"],
    ["_tensors"],
    ["_tools"],
    ["emulated", "report"],
    ["_dry"],
    ["_environment"],
    # the public names
    [
        "allocation_iterations",
        "allocation_logs",
        "allocators",
        "memory",
        "replays",
        "tools",
        "traces",
    ],
    [PACKAGE],
    ["cli"],
    ["__main__"],
]
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}


def modules(files: Files) -> dict[str, str]:
    """The texts of the package's modules, by name."""
    return {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for path, text in files.items()
        if path.startswith(f"{PACKAGE}/") and path.endswith(".py")
    }


def imports(module: str, known: Mapping[str, str], *, at_the_top: bool) -> Iterator[str]:
    """Modules of the package that `module` imports. With `at_the_top`, only those imported when it is
    executed."""
    waiting: list[ast.AST] = [ast.parse(known[module])]
    while waiting:
        node = waiting.pop()
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [it.name for it in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{it.name}" for it in node.names]
        for name in named:
            if name == f"{PACKAGE}._C" or name.partition(".")[0] != PACKAGE:
                continue
            while name not in known:  # a name in a module
                name = name.rpartition(".")[0]
            if name != module:
                yield name
        if not (at_the_top and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))):
            waiting.extend(ast.iter_child_nodes(node))


def place(module: str) -> str:
    """The folder of a module, or the module itself if it is in none."""
    return module.split(".")[1] if "." in module else module


def cycles_of_imports(files: Files) -> list[str]:
    """Cycles of modules that import each other while they are executed, each cycle once."""
    known = modules(files)
    graph = {it: sorted(set(imports(it, known, at_the_top=True))) for it in known}
    complaints = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            complaints.append(" imports ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in graph[module]:
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return complaints


def imports_that_point_up(files: Files) -> list[str]:
    """Imports of modules that are not in a lower layer, including imports in functions."""
    known = modules(files)
    complaints = [f"{it}: {place(it)} is in no layer" for it in known if place(it) not in LAYER]
    for module in sorted(known):
        for other in sorted(set(imports(module, known, at_the_top=False))):
            below, above = LAYER.get(place(other)), LAYER.get(place(module))
            if below is None or above is None or place(module) == place(other):
                continue
            if below >= above:
                complaints.append(f"{module}: imports {other}, which is not below {place(module)}")
    return complaints


def code_at_the_top(files: Files) -> list[str]:
    """Top-level modules that define something. They may only re-export public names or start the program."""
    defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        f"{module} defines {node.name}"
        for module, text in modules(files).items()
        if f"{PACKAGE}/{place(module)}.py" in files and module != f"{PACKAGE}._environment"
        for node in ast.parse(text).body
        if isinstance(node, defining)
    ]
