"""Compares the documents under docs/ with the code that they describe."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import torch_uvm
from torch_uvm import _C

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from _residency_goals import goals  # noqa: E402

DOCS = ROOT / "docs"
DOCUMENTS = sorted(DOCS.glob("*.md"))


def table(document: Path, column: str) -> dict[str, list[str]]:
    """The rows of the table with this heading in its first column: cells without backticks, by first cell."""
    rows: dict[str, list[str]] = {}
    inside = False
    for line in document.read_text().splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == column:
            inside = True
        elif inside and not cells[0].startswith("---"):
            assert cells[0] not in rows, f"{document.name} has {cells[0]} twice"
            rows[cells[0]] = cells[1:]
    return rows


def test_every_option_is_documented() -> None:
    written = table(DOCS / "options.md", "option")
    real = {
        option["key"]: [option["default"], option["accepted"], option["description"]]
        for option in _C.describe_options()
    }
    assert written == real
    assert list(written) == list(real)  # in the same order


def profiles() -> dict[str, str]:
    """The source of each cost profile, by its name."""
    source = (ROOT / "csrc" / "runtime" / "emulated" / "cost_profile.cpp").read_text()
    _, *parts = re.split(r'^ +\.name = "(\w+)",$', source, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_cost_is_documented() -> None:
    fields = {
        name: dict(re.findall(r"^ +\.(\w+) = ([\d.]+)", source, re.MULTILINE))
        for name, source in profiles().items()
    }
    assert list(fields) == torch_uvm.emulated.profiles()
    assert all(len(costs) == 20 for costs in fields.values())
    rows = table(DOCS / "emulator.md", "field")
    for column, profile in enumerate(fields):
        assert {name: cells[column] for name, cells in rows.items()} == fields[profile]


def test_costs_documented_as_assumed_are_marked_in_the_source() -> None:
    assumed = set(re.findall(r"^ +\.(\w+) = .*// assumed", profiles()["h200"], re.MULTILINE))
    rows = table(DOCS / "emulator.md", "field")
    assert {name for name, cells in rows.items() if cells[3].startswith("assumed")} == assumed


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_names_of_the_package_exist(document: Path) -> None:
    for name in sorted(set(re.findall(r"\btorch_uvm((?:\.[a-z_]+)+)\(", document.read_text()))):
        found: object = torch_uvm
        for part in name.strip(".").split("."):
            assert hasattr(found, part), f"{document.name} names torch_uvm{name}"
            found = getattr(found, part)


def measured(*names: str, file: str = "residency.json") -> list[str]:
    """Goals' values for the rows of the residency benchmark's results, formatted as in documents."""
    rows = json.loads((ROOT / "benchmarks" / "results" / file).read_text())["rows"]
    values = {goal.name: goal.value for goal in goals(rows)}
    return [f"{values[name]:.2f}" for name in names]


KINDS = [  # the rows of performance.md for each card: a workload and a kind of update
    ("16k tokens, checkpointing", "engine, deferred"),
    ("16k tokens, checkpointing", "engine, auto"),
    ("language model", "engine, deferred"),
    ("language model, optimizer in backward", "engine"),
]
FSDP2 = [
    f"FSDP2 offload / engine at no more peak, {case}"
    for case in ("2k tokens", "16k tokens, checkpointing", "16k tokens")
]
SAVE_ON_CPU = [f"save_on_cpu / engine at no more peak, {case}" for case in ("2k tokens", "16k tokens", "CNN")]


@pytest.mark.parametrize("card", ["H100", "H200"])
def test_steps_of_the_performance_page_are_those_of_the_results(card: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/residency_{card.lower()}_goals.json").read_text())["rows"]
    steps = {(row["workload"], row["name"]): row["step_ms"] for row in rows if "step_ms" in row}
    written = table(DOCS / "performance.md", card).values()
    for (workload, kind), cells in zip(KINDS, written, strict=True):
        in_core = steps[workload, "in core"]
        parts = [steps.get((workload, f"{kind}, 1/{part}")) for part in ("1.5", "2", "4")]
        wanted = [f"{in_core:.0f}", *(f"{step / in_core:.2f}" for step in parts if step is not None)]
        assert cells[: len(wanted)] == wanted


def test_peers_of_the_performance_page_are_those_of_the_results() -> None:
    rows = list(table(DOCS / "performance.md", "their step / ours").values())
    newest = [measured(*FSDP2[1::-1], file=f"residency_{card}_goals.json") for card in ("h100", "h200")]
    assert [cells[:2] for cells in rows[:2]] == [list(both) for both in zip(*newest, strict=True)]
    earlier = [cells[0].strip("| ") for cells in rows[2:6]]  # they were not measured on an H100
    assert earlier == measured(FSDP2[2], *SAVE_ON_CPU)


def test_whole_cards_of_the_performance_page_are_those_of_the_results() -> None:
    page, results = DOCS / "performance.md", ROOT / "benchmarks" / "results"
    found = json.loads((results / "full_card.json").read_text())
    runs = {it["row"]: it for it in found["runs"] if it["mode"] == "uvm" and it["steps"]}
    rows = table(page, "whole H100")
    assert [name[0] for name in rows] == sorted(runs)
    for name, cells in rows.items():
        run, plan = runs[name[0]], found["plans"].get(name[0])
        share = f"{run['flops'] / found['rate']:.2f}"
        wanted = [f"{run['step_s']:.3g}", f"{run['tokens_per_s']:,.0f}".replace(",", " "), share]
        if plan is not None:
            wanted += [f"{plan['step_ms'] / 1e3:.2f}", f"{plan['bound_ms'] / 1e3:.2f}"]
            wanted += [f"{run['step_s'] * 1e3 / plan['bound_ms']:.2f}"]
        assert cells[1 : 1 + len(wanted)] == wanted
    fits = json.loads((results / "full_card_h200.json").read_text())["runs"]
    written = table(page, "whole H200, [file](../benchmarks/results/full_card_h200.json)")
    assert [cells[0] for cells in written.values()] == [f"{it['step_s']:.2f}" for it in fits]


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "full_card.json").read_text())["runs"]
    measured = [it for it in runs if it["mode"] == "uvm" and it["steps"]]
    wanted = {f"{it['step_s']:.3g}": f"{it['tokens_per_s']:,.0f}".replace(",", " ") for it in measured}
    rows = re.findall(r"\| (?:16|20|73) \| ([\d.]+) \| ([\d ]+) \|", (ROOT / "README.md").read_text())
    assert dict(rows) == wanted


def test_the_index_has_every_document() -> None:
    index = (DOCS / "index.md").read_text()
    assert [
        document.name
        for document in DOCUMENTS
        if document.name != "index.md" and f"({document.name})" not in index
    ] == []


def test_versions_agree() -> None:
    """pyproject.toml, the newest release of the changelog, and CITATION.cff with its date."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released, date = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", changelog, re.MULTILINE)[0]
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [released]
    assert re.findall(r"^date-released: (\S+)$", citation, re.MULTILINE) == [date]
    assert version == released or version.endswith(".dev0")


def test_the_recipes_list_every_example() -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("_")}
    listed = set(re.findall(r"\(../examples/(\w+\.py)\)", (DOCS / "recipes.md").read_text()))
    assert listed == examples


def test_documented_counters_are_the_existing_ones() -> None:
    """`counters` documents its keys in its docstring. Docstring and keys come from one list in the
    runtime."""
    said = set(
        re.findall(r"[a-z]+(?:_[a-z]+)+|kernels|synchronisations", torch_uvm.emulated.counters.__doc__ or "")
    )
    assert set(_C.emu_counters(None)) <= said


def test_docstrings_describe_arguments_and_errors() -> None:
    modules = (torch_uvm, torch_uvm.memory, torch_uvm.tools, torch_uvm.allocators, torch_uvm.emulated)
    named = {f"{it.__name__}.{name}": getattr(it, name) for it in modules for name in it.__all__}
    incomplete = []
    for name, function in named.items():
        if not inspect.isfunction(function):
            continue
        texts = [inspect.getdoc(function) or ""]
        for text in texts:  # and those of the functions that it refers to
            others = re.findall(r"as\s+(?:those|that)\s+of\s+`(\w+)`", text)
            found = [inspect.getdoc(it) or "" for key, it in named.items() if key.split(".")[-1] in others]
            texts += [each for each in found if each not in texts]
        parameters = list(inspect.signature(function).parameters)
        said = "".join(text.partition("Args:")[2].partition("Raises:")[0] for text in texts)
        incomplete += [f"{name}: {each}" for each in parameters if not re.search(rf"\b{each}\b", said)]
        incomplete += [f"{name}: errors"] if parameters and "Raises:" not in "".join(texts) else []
    assert incomplete == []
