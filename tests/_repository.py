"""Rules for the repository. Each rule is a function from files to complaints."""

from __future__ import annotations

import graphlib
import posixpath
import re
from collections.abc import Iterable, Mapping

# Texts of files by their path within the repository.
Files = Mapping[str, str]

# Folders of csrc, lowest layer first. Each may include itself and the lines before it. Folders on one line do
# not include each other.
LAYERS = [
    ["runtime"],
    ["runtime/emulated"],
    ["allocator"],
    ["allocator/caching", "allocator/arena", "allocator/plan"],
    ["allocator/caching/pressure", "allocator/adaptors"],
    ["allocator/replay"],
    ["config"],
    ["residency/policy"],
    ["residency/trace"],
    ["residency/engine"],
    ["tensor/process"],
    ["tensor/storage"],
    ["tensor/hints", "tensor/dispatch"],
    ["tensor/moves"],
    ["emulated", "cuda"],
    ["python"],
]
LAYER = {folder: height for height, layer in enumerate(LAYERS) for folder in layer}
WITHOUT_TORCH = {"runtime", "allocator", "config", "residency"}

ENGINE_LINES = 250  # of the residency engine's interface
SOURCE_LINES = 401


def under(files: Files, *folders: str) -> dict[str, str]:
    return {path: text for path, text in files.items() if path.startswith(folders)}


def sources(files: Files) -> dict[str, str]:
    """The C++ files by their path within csrc."""
    return {
        path.removeprefix("csrc/"): text
        for path, text in under(files, "csrc/").items()
        if path.endswith((".h", ".cpp", ".cu", ".cuh"))
    }


def includes(files: Files) -> Iterable[tuple[str, str]]:
    """(path, included path) for every #include; paths are within csrc."""
    for path, text in sources(files).items():
        for included in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
            yield path, included


def includes_that_point_up(files: Files) -> list[str]:
    """Includes of a folder that is not in a lower layer, and folders that LAYERS does not list."""
    complaints = []
    for path, included in includes(files):
        folder, other = (posixpath.dirname(each) for each in (path, included))
        if folder not in LAYER:
            complaints.append(f"{path}: {folder} is in no layer")
        elif other in LAYER and other != folder and LAYER[other] >= LAYER[folder]:
            complaints.append(f"{path}: includes {included}, which is not below {folder}")
    return complaints


def units(files: Files) -> dict[str, str]:
    """The unit of each C++ file: a header `x.h`, its source `x.cpp`, and private headers, which define nested
    classes of those in `x.h` (`struct X::State {`)."""
    texts = sources(files)
    found = {path: posixpath.splitext(path)[0] for path in texts}
    for path, text in texts.items():
        nested = re.search(r"^(?:struct|class) (\w+)::\w+[^;{]*\{", text, re.MULTILINE)
        if path.endswith(".h") and nested:
            head = rf"^(?:struct|class) {nested[1]}\b(?!::)"
            outer = re.compile(rf"{head}[^;:{{]*(?::[^;{{]*)?\{{", re.MULTILINE)
            for other, other_text in texts.items():
                if posixpath.dirname(other) == posixpath.dirname(path) and outer.search(other_text):
                    found[path] = found[other]
    return found


def include_cycles(files: Files) -> list[str]:
    """The first cycle of units that include each other, if there is one."""
    unit_of = units(files)
    graph: dict[str, set[str]] = {unit: set() for unit in unit_of.values()}
    for path, included in includes(files):
        if included in unit_of and unit_of[included] != unit_of[path]:
            graph[unit_of[path]].add(unit_of[included])
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def sources_that_are_not_there(files: Files) -> list[str]:
    """Paths of C++ files that are named in a text and do not exist. In csrc and docs/design.md, paths are
    relative to csrc."""
    complaints = []
    for path, text in files.items():
        if path in ("CHANGELOG.md", "tests/test_repository.py"):  # refers to past files, and to invented ones
            continue
        within = path == "docs/design.md" or path.startswith("csrc/")
        folders = "|".join(sorted({folder.split("/")[0] for folder in LAYER}))
        for found in re.finditer(rf"(?<![\w/])(csrc/)?((?:{folders})(?:/\w+)+\.(?:h|cpp))\b", text):
            if (found[1] or within) and f"csrc/{found[2]}" not in files:
                complaints.append(f"{path}: names {found[0]}")
    return complaints


def functions_that_are_not_there(files: Files) -> list[str]:
    """Functions in docs/design.md's table of files that none of the files in their row has."""
    complaints = []
    found = inside = False  # the table
    for line in files["docs/design.md"].splitlines():
        cells = line.split("|")
        if len(cells) < 5:
            inside = False
            continue
        if cells[2].strip() == "file":
            found = inside = True
        if not inside:
            continue
        named = re.findall(r"`([\w/]+\.(?:cpp|h|py))`", cells[2])
        texts = [text for path, text in files.items() for name in named if path.endswith(f"/{name}")]
        for function in re.findall(r"`(?:\w+::)?(\w+)`", cells[3]):
            if not any(re.search(rf"\b{function}\b", text) for text in texts):
                complaints.append(f"docs/design.md: {function} is not in {', '.join(named)}")
    return complaints if found else ["docs/design.md: no table has `file` as its second column"]


def torch_below_torch(files: Files) -> list[str]:
    foreign = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")
    return [
        f"{path}: includes {included}"
        for path, included in includes(files)
        if path.split("/")[0] in WITHOUT_TORCH and foreign.match(included)
    ]


def files_that_allocate_managed(files: Files) -> list[str]:
    """Calls that allocate managed memory from the runtime. The limit must guard each of them, so at most one
    file may have them."""
    return [
        path for path, text in under(files, "csrc/", "torch_uvm/").items() if "cudaMallocManaged(" in text
    ]


def paths_of_a_machine(files: Files) -> list[str]:
    home = re.compile(r"(?<![\w.:/])/(?:home|root|Users|work)/[\w.]+")
    return [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {found.group()}"
        for path, text in files.items()
        for found in home.finditer(text)
    ]


def pins(text: str) -> dict[str, str]:
    """The versions in all occurrences of `name==version`."""
    return {name.lower(): version for name, version in re.findall(r"([\w-]+)==([\w.]+)", text)}


def hooks_that_disagree(files: Files) -> list[str]:
    """Tools whose version differs between pre-commit and requirements/lint.txt, or is not pinned."""
    wanted, hooked = pins(files["requirements/lint.txt"]), pins(files[".pre-commit-config.yaml"])
    return [
        f"{name}: {wanted.get(name)} in requirements/lint.txt, {hooked.get(name)} in .pre-commit-config.yaml"
        for name in sorted(wanted.keys() | hooked.keys())
        if wanted.get(name) != hooked.get(name)
    ]


def unpinned(files: Files) -> list[str]:
    """Lines of requirements/*.txt without an exact version."""
    complaints = []
    for path, text in under(files, "requirements/").items():
        for line in text.splitlines():
            requirement = line.split("#")[0].strip()
            if (
                requirement
                and not requirement.startswith("-c ")
                and not re.fullmatch(r"[\w-]+==[\w.]+", requirement)
            ):
                complaints.append(f"{path}: {requirement}")
    return complaints


def tests_without_a_line(files: Files) -> list[str]:
    """Test files that tests/README.md does not name."""
    map_of_tests = files["tests/README.md"]
    tests = (
        path.removeprefix("tests/")
        for path in files
        if re.fullmatch(r"tests/(cpp/)?test_\w+\.(py|cpp)", path)
    )
    return [f"tests/README.md: {test} has no line" for test in tests if f"`{test}`" not in map_of_tests]


def promises_without_a_test(files: Files) -> list[str]:
    """Tests that tests/README.md names, `test_a.py::TestB::test_c`, and that do not exist."""
    complaints = []
    for path, names in re.findall(r"`([\w/]*test_\w+\.py)::([\w:]+)`", files["tests/README.md"]):
        text = files.get(f"tests/{path}", "")
        for name in names.split("::"):
            if not re.search(rf"^\s*(?:class|def) {name}\b", text, re.MULTILINE):
                complaints.append(f"tests/README.md: {path} has no {name}")
    return complaints


def too_long(files: Files) -> list[str]:
    code = (".h", ".cpp", ".cu", ".py", ".pyi", ".sh")
    bounded = {path: (text, SOURCE_LINES) for path, text in files.items() if path.endswith(code)}
    engine = "csrc/residency/engine/engine.h"
    if engine in files:
        bounded[f"{engine} up to its private part"] = (
            files[engine].partition("\n private:")[0],
            ENGINE_LINES,
        )
    return [
        f"{path} has {lines} lines; it may have {bound - 1}"
        for path, (text, bound) in bounded.items()
        if (lines := len(text.splitlines())) >= bound
    ]
