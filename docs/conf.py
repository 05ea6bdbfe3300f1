"""The site made of README.md, RFC.md and docs/*.md: `make docs`.

Sphinx reads the repository from its root, so that relative links between these files are the same here as on
a code host. A link to a file that is no page (an example, a header) becomes a copy of the file to download.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes  # type: ignore[import-untyped]
from sphinx.application import Sphinx

os.environ.setdefault("TORCH_UVM_DEVICE", "emu")  # autodoc imports the package: no GPU is initialised

project = "torch_uvm"
try:
    release = importlib.metadata.version("torch_uvm")
except importlib.metadata.PackageNotFoundError:  # a checkout that was built in place
    release = ""
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "tests/README.md", "benchmarks/**README.md"]
exclude_patterns = [".*", "build", "dist", "demo-output", "*.egg-info", "**/__pycache__"]

myst_heading_anchors = 4

html_theme = "alabaster"
html_theme_options = {
    "description": "more memory than the accelerator has, for unchanged PyTorch scripts",
    "fixed_sidebar": True,
    "page_width": "1200px",  # with docs/_static/custom.css: 120 columns of code beside the sidebar
    "sidebar_width": "200px",
    "body_max_width": "none",
    "show_powered_by": False,
}
html_static_path = ["_static"]
html_show_copyright = False
html_copy_source = False

# Docstrings say types in words where they matter; single backticks are our names, or else code.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "py:obj"

# What is not ours and has no page here: PyTorch's names, and Python's.
nitpick_ignore_regex = [
    (r"py:(class|exc|obj)", r"(torch|collections|pathlib|os|typing|types|contextlib|enum)\..*"),
    (r"py:(class|exc)", r"[A-Z]\w*(Error|Warning)|int|str|bool|float|tuple|NamedTuple|Path"),
]


def _as_code(app: Sphinx, env: Any, node: nodes.Element, content: nodes.Element) -> nodes.Element | None:
    """`x` in a docstring that names nothing of ours is code, and no broken link."""
    return content if node.get("reftype") == "obj" else None


def _before_it_is_read(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a folder, which a code host lists, is its text here; the links to pages in the index's
    last section, in their order, are the table of contents."""
    here = (Path(app.srcdir) / docname).parent

    def plain(link: re.Match[str]) -> str:
        return link[1] if (here / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)\)", plain, source[0])
    if docname == root_doc:
        table = source[0].rpartition("\n## ")[2]
        pages = "\n".join(re.findall(r"\]\(([^)#:]+)\.md\)", table))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:maxdepth: 2\n\n{pages}\n```\n"


def _first_page(app: Sphinx, error: Exception | None) -> None:
    """The pages lie in folders as their sources do; who opens the site's root is led to the first of them."""
    if error is None and app.builder.name == "html":
        page = f"{root_doc}.html"
        (Path(app.outdir) / "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>{project}</title>'
            f'<meta http-equiv="refresh" content="0; url={page}"><a href="{page}">{project}</a>\n'
        )


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", _as_code)
    app.connect("source-read", _before_it_is_read)
    app.connect("build-finished", _first_page)
