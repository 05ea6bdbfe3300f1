"""Groups of C++ files that are compiled jointly, each group by a file that includes its members.

Reading torch's headers takes most of the time of a file that includes them, so a group takes little more than
one of its members. Files of one group must not define the same name in unnamed namespaces or as static.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def own_names(text: str) -> set[str]:
    """Names that a file defines in an unnamed namespace, found by clang-format's layout."""
    own = "\n".join(re.findall(r"^namespace \{$(.*?)^\} // namespace$", text, re.MULTILINE | re.DOTALL))
    types = r"^(?:struct|class|enum class|enum|using(?= \w+ =)) (\w+)\b"
    rest = r"^(?!namespace|using|struct|class|enum|template)[A-Za-z_][^\n(={;]*?(\w+)(?:\[.*\])?(?: =|[({;])"
    return {name for kind in (types, rest) for name in re.findall(kind, own, re.MULTILINE)}


def groups(files: Iterable[Path], most: int | None = None) -> list[list[Path]]:
    """Groups of at most `most` files without common names. Their number of files bounds them, not their
    length: an edit that adds a line leaves all groups as they are."""
    found: list[tuple[list[Path], set[str]]] = []
    for file in files:
        names = own_names(file.read_text())
        free = (each for each in found if len(each[0]) != most and not names & each[1])
        together, taken = next(free, ([], set()))
        if not together:
            found.append((together, taken))
        together.append(file)
        taken |= names
    return [together for together, _ in found]


def write(target: Path, members: Iterable[str | Path]) -> Path:
    """Writes the file that includes a group's members, unless it is up to date."""
    text = "".join(f'#include "{member}"\n' for member in members)
    if not target.is_file() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return target
