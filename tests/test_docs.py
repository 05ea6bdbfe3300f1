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
    _, *parts = re.split(r"^const CostProfile& (\w+)\(\) \{$", source, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_cost_is_documented() -> None:
    fields = {
        name: dict(re.findall(r"^ +\.(\w+) = ([\d.]+)", source, re.MULTILINE))
        for name, source in profiles().items()
    }
    assert list(fields) == torch_uvm.emulated.profiles()
    assert all(len(costs) == 20 for costs in fields.values())
    assert {name: cells[0] for name, cells in table(DOCS / "emulated.md", "field").items()} == fields["h200"]
    rows = table(DOCS / "emulated.md", "cost")
    assert {name: cells[0] for name, cells in rows.items()} == fields["gb10"]
    assert {name: cells[1] for name, cells in rows.items()} == fields["gh200"]


def test_costs_documented_as_assumed_are_marked_in_the_source() -> None:
    assumed = set(re.findall(r"^ +\.(\w+) = .*// assumed", profiles()["h200"], re.MULTILINE))
    rows = table(DOCS / "emulated.md", "field")
    assert {name for name, cells in rows.items() if cells[1].startswith("assumed")} == assumed


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


STEPS = [f"16k tokens, checkpointing, {budget}: step / in core" for budget in ("1/1.5", "1/2", "1/4")]
FSDP2 = [
    f"FSDP2 offload / engine at no more peak, {case}"
    for case in ("2k tokens", "16k tokens, checkpointing", "16k tokens")
]
H100 = "residency_h100.json"
SAVE_ON_CPU = [f"save_on_cpu / engine at no more peak, {case}" for case in ("2k tokens", "16k tokens", "CNN")]


def test_figures_of_coming_from_are_those_of_the_results() -> None:
    """coming-from.md: step times of other means over ours, at no more memory."""
    sections = (DOCS / "coming-from.md").read_text().split("\n## ")
    for title, figures in {
        "`torch.autograd.graph.save_on_cpu`": measured(*SAVE_ON_CPU[:2]),
        "FSDP2's `CPUOffloadPolicy`": measured(*FSDP2[:2], file=H100) + measured(FSDP2[2]),
    }.items():
        (section,) = (each for each in sections if each.startswith(title))
        assert re.findall(r"\d\.\d+(?=\s+times)", section) == figures


def test_figures_of_the_performance_page_are_those_of_the_results() -> None:
    page = DOCS / "performance.md"
    steps = table(page, "step time / in core")
    assert steps['... optimizer="deferred"'] == measured(*STEPS)
    others = table(page, "beside others, at no more memory: their step / ours")
    assert [cells[0] for cells in others.values()][:6] == measured(*FSDP2, *SAVE_ON_CPU)
    newest = table(page, "a peer's step / ours, at no more memory")
    assert [cells[2] for cells in newest.values()][:2] == measured(*FSDP2[1::-1], file=H100)


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


def test_the_examples_page_has_every_example() -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("_")}
    listed = set(re.findall(r"\(../examples/(\w+\.py)\)", (DOCS / "examples.md").read_text()))
    assert listed == examples


def test_documented_counters_are_the_existing_ones() -> None:
    """`counters` documents its keys in its docstring. Docstring and keys come from one list in the
    runtime."""
    said = set(
        re.findall(r"[a-z]+(?:_[a-z]+)+|kernels|synchronisations", torch_uvm.emulated.counters.__doc__ or "")
    )
    assert set(_C.emu_counters(None)) <= said


def test_docstrings_describe_arguments_and_errors() -> None:
    named = {f"torch_uvm.{name}": getattr(torch_uvm, name) for name in torch_uvm.__all__}
    named |= {f"emulated.{name}": getattr(torch_uvm.emulated, name) for name in torch_uvm.emulated.__all__}
    incomplete = []
    for name, function in named.items():
        text = inspect.getdoc(function) or ""
        if not inspect.isfunction(function) or "as those of `empty`" in text:
            continue
        parameters = list(inspect.signature(function).parameters)
        said = text.partition("Args:")[2].partition("Raises:")[0]
        incomplete += [f"{name}: {each}" for each in parameters if not re.search(rf"\b{each}\b", said)]
        incomplete += [f"{name}: errors"] if parameters and "Raises:" not in text else []
    assert incomplete == []
