"""The documentation site (docs/conf.py) builds without warnings and contains every public name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest
from _spawn import Spawn

import torch_uvm

pytest.importorskip("myst_parser", reason="requirements/docs.txt is not installed")

ROOT = Path(__file__).resolve().parent.parent
SPHINX = ["-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-c", str(ROOT / "docs")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site like `make docs`. Warnings fail the build."""
    folder = tmp_path_factory.mktemp("site")
    build = [*SPHINX, "-d", str(folder / "doctrees"), str(ROOT), str(folder / "html")]
    Spawn(folder)(args=build, timeout=900)
    return folder / "html"


def test_every_document_is_a_page(site: Path) -> None:
    sources = [ROOT / "README.md", ROOT / "RFC.md", *(ROOT / "docs").glob("**/*.md")]
    pages = {path.relative_to(ROOT): site / path.relative_to(ROOT).with_suffix(".html") for path in sources}
    assert len(pages) > 10
    assert [source for source, page in pages.items() if not page.is_file()] == []


def test_the_root_redirects_to_the_first_page(site: Path) -> None:
    linked = re.findall(r'href="([^"]+)"', (site / "index.html").read_text())
    assert linked and all((site / link).is_file() for link in linked)


def test_it_works_offline(site: Path) -> None:
    loads = r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//'
    assert [page for page in site.glob("**/*.html") if re.search(loads, page.read_text())] == []


def test_links_to_files_that_are_no_pages_are_downloads(site: Path) -> None:
    page = (site / "docs" / "index.html").read_text()
    (link,) = re.findall(r'href="([^"]+/caching_managed_allocator\.h)"', page)
    assert (site / "docs" / link).is_file()


def test_code_of_120_columns_is_shown_whole(site: Path) -> None:
    """Beside the sidebar, at the theme's page width. Otherwise the demo's table would be cut off."""
    theme = (site / "_static" / "alabaster.css").read_text()
    basic = (site / "_static" / "basic.css").read_text()
    ours = (site / "_static" / "custom.css").read_text()
    page = re.search(r"div\.document \{\s*width: (\d+)px", theme)
    side = re.search(r"div\.bodywrapper \{\s*margin: 0 0 0 (\d+)px", theme)
    body = re.search(r"div\.body \{[^}]*padding: 0 (\d+)px", theme)
    most = re.search(r"div\.body \{[^}]*max-width: (\w+)", basic)
    code = re.search(r"div\.highlight pre \{\s*font-size: ([\d.]+)px[^}]*padding: 7px (\d+)px", ours)
    assert page and side and body and most and code and most[1] == "none"
    room = int(page[1]) - int(side[1]) - 2 * int(body[1]) - 2 * int(code[2])
    # The width of DejaVu Sans Mono, the widest of the theme's fonts.
    assert 120 * 0.602 * float(code[1]) <= room
    blocks = re.findall(r"<pre>(.*?)</pre>", (site / "docs" / "recipes.html").read_text(), re.S)
    rows = [re.sub("<[^>]+>", "", line) for block in blocks for line in block.splitlines()]
    table = [row for row in rows if "torch_uvm, engine" in row]
    assert table and max(map(len, table)) <= 120
    assert 'href="_static/custom.css' in (site / "README.html").read_text()


def public_names(module: ModuleType) -> list[str]:
    """The public names of a module: `__all__`, or its definitions without an underscore."""
    said: list[str] | None = getattr(module, "__all__", None)
    if said is not None:
        return said
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "docs" / "api.html").read_text()
    there = set(re.findall(r'id="(?:module-)?(torch_uvm[\w.]*)"', page))
    modules = [importlib.import_module(name) for name in re.findall(r'id="module-(torch_uvm[\w.]*)"', page)]
    submodules = [
        importlib.import_module(f"torch_uvm.{each.name}")
        for each in pkgutil.iter_modules(torch_uvm.__path__)
        if not each.name.startswith("_") and each.name != "cli"
    ]
    modules += [module for module in submodules if hasattr(module, "__all__")]
    assert torch_uvm in modules and torch_uvm.emulated in modules
    wanted = {f"{module.__name__}.{name}" for module in modules for name in public_names(module)}
    assert len(wanted) > 60
    assert sorted(wanted - there) == []


def test_every_public_function_has_a_docstring() -> None:
    modules = (torch_uvm, torch_uvm.memory, torch_uvm.tools, torch_uvm.allocators)
    functions = {name: getattr(it, name) for it in modules for name in it.__all__}
    assert [name for name, value in functions.items() if not (value.__doc__ or "").strip()] == []


def test_errors_in_documents_fail_the_build(tmp_path: Path) -> None:
    pages = {
        "docs/index.md": "# Index\n\n[a page](page.md) and [none](nowhere.md)\n",
        "docs/page.md": "# Page\n\n[an anchor](index.md#nowhere)\n\n"
        "```{eval-rst}\n.. autofunction:: torch_uvm.no_such_function\n```\n",
        "docs/forgotten.md": "# Not in the index\n",
    }
    for name, text in pages.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    build = [*SPHINX, "-b", "dummy", str(tmp_path / "source"), str(tmp_path / "out")]
    done = Spawn(tmp_path)(args=build, check=False, timeout=900)
    assert done.returncode != 0
    for complaint in ["nowhere.md", "'nowhere'", "no_such_function", "forgotten.md"]:
        assert complaint in done.stderr, done.stderr
