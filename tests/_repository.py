"""Rules that hold for the repository itself, each as a function from files to complaints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# A file of text by its path within the repository.
Files = Mapping[str, str]

# Each floor may include itself and the floors below it; the two on one line do not know each other.
STOREYS = [
    ["runtime"],
    ["allocator"],
    ["config"],
    ["residency"],
    ["tensor"],
    ["emulated", "cuda"],
    ["python"],
]
STOREY = {floor: height for height, storey in enumerate(STOREYS) for floor in storey}
WITHOUT_TORCH = {"runtime", "allocator", "config", "residency"}

README_LINES = 200


def under(files: Files, *folders: str) -> dict[str, str]:
    return {path: text for path, text in files.items() if path.startswith(folders)}


def includes(files: Files) -> Iterable[tuple[str, str, str]]:
    """(path, its floor, what it includes) for every #include on every floor."""
    for path, text in under(files, "csrc/").items():
        for included in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
            yield path, path.split("/")[1], included


def includes_that_point_up(files: Files) -> list[str]:
    complaints = []
    for path, floor, included in includes(files):
        other = included.split("/")[0]
        if floor not in STOREY:
            complaints.append(f"{path}: {floor} is no floor")
        elif other in STOREY and other != floor and STOREY[other] >= STOREY[floor]:
            complaints.append(f"{path}: includes {included}, which is not below {floor}")
    return complaints


def torch_below_torch(files: Files) -> list[str]:
    foreign = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")
    return [
        f"{path}: includes {included}"
        for path, floor, included in includes(files)
        if floor in WITHOUT_TORCH and foreign.match(included)
    ]


def files_that_allocate_managed(files: Files) -> list[str]:
    """Where the runtime is asked for managed memory: the limit must guard every call, so one file at most."""
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
    """The versions in `name==version`, wherever it stands."""
    return {name.lower(): version for name, version in re.findall(r"([\w-]+)==([\w.]+)", text)}


def hooks_that_disagree(files: Files) -> list[str]:
    """Tools that pre-commit and requirements/lint.txt do not pin to one version."""
    wanted, hooked = pins(files["requirements/lint.txt"]), pins(files[".pre-commit-config.yaml"])
    return [
        f"{name}: {wanted.get(name)} in requirements/lint.txt, {hooked.get(name)} in .pre-commit-config.yaml"
        for name in sorted(wanted.keys() | hooked.keys())
        if wanted.get(name) != hooked.get(name)
    ]


def unpinned(files: Files) -> list[str]:
    """Lines of requirements/*.txt that leave a version open."""
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
    """Files of tests that tests/README.md does not name."""
    map_of_tests = files["tests/README.md"]
    tests = (
        path.removeprefix("tests/")
        for path in files
        if re.fullmatch(r"tests/(cpp/)?test_\w+\.(py|cpp)", path)
    )
    return [f"tests/README.md: {test} has no line" for test in tests if f"`{test}`" not in map_of_tests]


def promises_without_a_test(files: Files) -> list[str]:
    """Tests that tests/README.md names, `test_a.py::TestB::test_c`, and that are not there."""
    complaints = []
    for path, names in re.findall(r"`([\w/]*test_\w+\.py)::([\w:]+)`", files["tests/README.md"]):
        text = files.get(f"tests/{path}", "")
        for name in names.split("::"):
            if not re.search(rf"^\s*(?:class|def) {name}\b", text, re.MULTILINE):
                complaints.append(f"tests/README.md: {path} has no {name}")
    return complaints


def readme_too_long(files: Files) -> list[str]:
    lines = len(files["README.md"].splitlines())
    return [] if lines < README_LINES else [f"README.md has {lines} lines; it may have {README_LINES - 1}"]
