"""The layout of the Python package (tests/_imports.py), and examples of files that break its rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import _imports as rules
import pytest

ROOT = Path(__file__).resolve().parent.parent
RULES = [rules.cycles_of_imports, rules.imports_that_point_up, rules.code_at_the_top]


def package() -> dict[str, str]:
    return {str(it.relative_to(ROOT)): it.read_text() for it in (ROOT / "torch_uvm").rglob("*.py")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_is_kept(rule: Callable[[rules.Files], list[str]]) -> None:
    files = package()
    assert len(files) > 50
    assert rule(files) == []


OTHERS = {"torch_uvm/__init__.py": "", "torch_uvm/_util/b.py": "", "torch_uvm/_patches/__init__.py": ""}

# A rule, the path of a file, a text that breaks the rule, and one that satisfies it.
BREACHES = [
    (
        rules.cycles_of_imports,
        "torch_uvm/_util/a.py",
        "from torch_uvm._util import c",
        "def f():\n    from torch_uvm._util import c",
    ),
    (
        rules.cycles_of_imports,
        "torch_uvm/_util/a.py",
        "class A:\n    from torch_uvm._util.c import name",
        "from torch_uvm._util.b import name",
    ),
    (
        rules.imports_that_point_up,
        "torch_uvm/_util/d.py",
        "def f():\n    import torch_uvm._patches",
        "import torch_uvm._util.b\nimport torch\nfrom torch_uvm import _C",
    ),
    (
        rules.imports_that_point_up,
        "torch_uvm/_tensors/d.py",
        "import torch_uvm",
        "from torch_uvm import _patches",
    ),
    (rules.code_at_the_top, "torch_uvm/keep.py", "class Kept: ...", "from torch_uvm._util.b import Kept"),
]


@pytest.mark.parametrize(("rule", "path", "broken", "kept"), BREACHES)
def test_rule_sees_a_breach(
    rule: Callable[[rules.Files], list[str]], path: str, broken: str, kept: str
) -> None:
    files = {**OTHERS, "torch_uvm/_util/c.py": "import torch_uvm._util.a"}
    files.setdefault("torch_uvm/_util/a.py", "")
    assert len(rule({**files, path: broken})) == 1
    assert rule({**files, path: kept}) == []


def test_each_folder_has_a_layer() -> None:
    assert rules.imports_that_point_up({**OTHERS, "torch_uvm/_nowhere/d.py": ""}) == [
        "torch_uvm._nowhere.d: _nowhere is in no layer"
    ]
