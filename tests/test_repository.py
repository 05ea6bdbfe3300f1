"""The rules of tests/_repository.py, on the files that git tracks, and on examples that break them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import _repository as rules
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tracked() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {}
    for path in filter(None, listed.stdout.split("\0")):
        file = ROOT / path
        if file.is_file():  # a tracked file may have been removed
            content = file.read_bytes()
            if b"\0" not in content:
                files[path] = content.decode()
    assert files
    return files


RULES = [
    rules.includes_that_point_up,
    rules.include_cycles,
    rules.sources_that_are_not_there,
    rules.functions_that_are_not_there,
    rules.torch_below_torch,
    rules.paths_of_a_machine,
    rules.hooks_that_disagree,
    rules.unpinned,
    rules.too_long,
    rules.tests_without_a_line,
    rules.promises_without_a_test,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_is_kept(rule: Callable[[rules.Files], list[str]], tracked: dict[str, str]) -> None:
    assert rule(tracked) == []


def test_managed_memory_is_allocated_in_one_place(tracked: dict[str, str]) -> None:
    assert len(rules.files_that_allocate_managed(tracked)) <= 1


OTHERS = {
    "csrc/runtime/x.h": "class X {\n  struct State;\n};\n",
    "csrc/runtime/x.cpp": '#include "runtime/x_state.h"\n',
    "csrc/runtime/x_state.h": '#include "runtime/x.h"\nstruct X::State {\n};\n',
    "csrc/runtime/y.h": '#include "runtime/x.h"\n',
    "tests/test_b.py": "class TestC:\n    def test_d(self): ...\n",
    ".pre-commit-config.yaml": "[ruff==1.2]\n[mypy==3]\n",
    "tests/test_a.py": "",
    "tests/README.md": "`test_a.py`, `test_b.py`",
}

# A rule, the path of a file, a text that breaks the rule, and one that satisfies it.
BREACHES = [
    (rules.includes_that_point_up, "csrc/runtime/a.h", '#include "allocator/b.h"', '#include "runtime/b.h"'),
    (
        rules.includes_that_point_up,
        "csrc/emulated/a.h",
        '# include "cuda/b.h"',
        '#include "tensor/moves/b.h"',
    ),
    (rules.includes_that_point_up, "csrc/allocator/a.h", '#include "allocator/plan/b.h"', ""),
    (
        rules.includes_that_point_up,
        "csrc/tensor/hints/a.cpp",
        '#include "tensor/dispatch/b.h"',
        '#include "tensor/storage/b.h"',
    ),
    (rules.includes_that_point_up, "csrc/else/a.h", "#include <map>", ""),
    (rules.include_cycles, "csrc/runtime/x.cpp", '#include "runtime/y.h"', '#include "runtime/x_state.h"'),
    (
        rules.include_cycles,
        "csrc/runtime/x_state.h",
        '#include "runtime/y.h"\nstruct X::State {\n};\n',
        '#include "runtime/x.h"\nclass X::State final {\n};\n',
    ),
    (
        rules.sources_that_are_not_there,
        "docs/a.md",
        "`csrc/runtime/z.h`",
        "`csrc/runtime/x.h`, `runtime/z.h`",
    ),
    (rules.sources_that_are_not_there, "csrc/README.md", "`runtime/z.h`", "`runtime/x.h`, `z.h`"),
    (
        rules.functions_that_are_not_there,
        "docs/design.md",
        "| step | file | function |\n| 1. | `runtime/x.h` | `X::nothing` |",
        "| step | file | function |\n| 1. | `runtime/x.h` | `X`, `State` |",
    ),
    (rules.torch_below_torch, "csrc/allocator/a.h", "#include <c10/core/Device.h>", "#include <map>"),
    (rules.torch_below_torch, "csrc/residency/a.h", "#include <torch/all.h>", "// <torch/all.h>"),
    (
        rules.files_that_allocate_managed,
        "csrc/cuda/a.cpp",
        "cudaMallocManaged(&p, 1)",
        "// cudaMallocManaged",
    ),
    (rules.paths_of_a_machine, "docs/a.md", "see /" + "home/alice/x", "https://example.org/home/page"),
    (rules.hooks_that_disagree, "requirements/lint.txt", "ruff==1.3\nmypy==3", "ruff==1.2\nmypy==3"),
    (rules.hooks_that_disagree, "requirements/lint.txt", "ruff==1.2", "ruff==1.2\nmypy==3"),
    (rules.unpinned, "requirements/a.txt", "-c b.txt\nnumpy>=2  # 17 MB", "-c b.txt\nnumpy==2.4  # 17 MB"),
    (rules.too_long, "csrc/residency/engine/engine.h", "x\n" * 250, "x\n" * 249),
    (rules.too_long, "tests/test_a.py", "x\n" * 401, "x\n" * 400),
    (
        rules.promises_without_a_test,
        "tests/README.md",
        "`test_b.py::TestC::test_d`, `test_b.py::TestC::test_e`",
        "`test_b.py::TestC::test_d` and `test_b.py`",
    ),
    (
        rules.tests_without_a_line,
        "tests/README.md",
        "`test_b.py`, `cpp/test_a.py`",
        "`test_b.py`, `test_a.py`",
    ),
]


@pytest.mark.parametrize(("rule", "path", "broken", "kept"), BREACHES)
def test_rule_sees_a_breach(
    rule: Callable[[rules.Files], list[str]], path: str, broken: str, kept: str
) -> None:
    assert len(rule({**OTHERS, path: broken})) == 1
    assert rule({**OTHERS, path: kept}) == []
