"""What the modules of torch_uvm import of each other, as rules: functions from files to complaints."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

# A file of text by its path within the repository.
Files = Mapping[str, str]

PACKAGE = "torch_uvm"

#: Folders and top-level modules, bottom to top: each imports what is above it in this list. Those on one line
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
    ["_environment"],
    # the public names
    ["accesses", "allocation_iterations", "allocation_logs", "allocations", "allocators", "arenas", "keep"]
    + ["plans", "replays", "traces"],
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
    """Modules of the package that `module` imports: all, or those that it imports when it is executed."""
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
    """The folder of a module, or the module where it lies in none."""
    return module.split(".")[1] if "." in module else module


def cycles_of_imports(files: Files) -> list[str]:
    """Modules that import each other while they are executed, each cycle once."""
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
    """Imports, those in functions included, of what is not in a layer below."""
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
    """Modules beside the folders that define something: there are public names alone, and what starts us."""
    defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        f"{module} defines {node.name}"
        for module, text in modules(files).items()
        if f"{PACKAGE}/{place(module)}.py" in files and module != f"{PACKAGE}._environment"
        for node in ast.parse(text).body
        if isinstance(node, defining)
    ]
