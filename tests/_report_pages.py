"""Parses the pages of `run --report` for tests."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

_VOID = {"meta", "br", "link", "img", "hr", "input", "base"}


class Page(HTMLParser):
    """A parsed page. Raises if the page is not well-formed.

    figures: the value of each `<data>`, by id. advice: the text, by key. rows: the cells of each body row of
    a table, by the table's id. requests: everything that the page would fetch or execute.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}
        self.advice: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.requests: list[str] = []
        self.text = ""
        self.pictures: list[str] = []
        self.tags: set[str] = set()
        self._open: list[tuple[str, dict[str, str]]] = []
        self._cell: list[str] | None = None
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.tags.add(tag)
        for key, value in given.items():
            own = key == "href" and value.startswith("./")
            if (key in ("src", "href", "srcset", "action", "data", "xlink:href") and not own) or key[
                :2
            ] == "on":
                self.requests.append(f"{tag} {key}={value}")
            if key == "style":
                self.requests.append(value)
        if tag in ("script", "iframe", "object", "embed", "link", "base", "form"):
            self.requests.append(tag)
        if tag == "data":
            assert given["id"] not in self.figures, given["id"]
            self.figures[given["id"]] = float(given["value"])
        if tag == "svg":
            self.pictures.append(given["aria-label"])
        if tag == "tr" and "tbody" in [it for it, _ in self._open]:
            table = next(it for name, it in self._open if name == "table")
            self.rows.setdefault(table["id"], []).append([])
        if tag in ("td", "th"):
            self._cell = []
        if tag not in _VOID:
            self._open.append((tag, given))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        name, given = self._open.pop()
        assert name == tag, f"{tag} ends within {name}"
        if tag in ("td", "th") and self._cell is not None:
            tables = [it for each, it in self._open if each == "table"]
            if "tbody" in [it for it, _ in self._open]:
                self.rows[tables[-1]["id"]][-1].append(" ".join("".join(self._cell).split()))
            self._cell = None

    def handle_data(self, data: str) -> None:
        inside = [it for it, _ in self._open]
        if "style" in inside:
            assert "url(" not in data and "@import" not in data
            return
        self.text += data
        if self._cell is not None:
            self._cell.append(data + " ")
        for name, given in self._open:
            if name == "li" and given.get("id", "").startswith("advice-"):
                key = given["id"].removeprefix("advice-")
                self.advice[key] = self.advice.get(key, "") + data


def read(path: Path) -> Page:
    """Parses a page and checks that it is self-contained."""
    page = Page(path.read_text(encoding="utf-8"))
    assert page.requests == []
    return page
