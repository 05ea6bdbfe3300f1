"""Text of others, such as the names of files, in what is written to a terminal."""

from __future__ import annotations


def printable(text: object) -> str:
    """`text` with everything that a terminal may obey, or cannot show, written as an escape: `\\x1b`."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in str(text))
