"""Text from outside, such as names of files, in output to a terminal."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""`text` with every character that a terminal may interpret, or cannot show, escaped: `\x1b`."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in str(text))


def excerpt(value: object) -> str:
    """The repr of a value from a file, for an error message; truncated to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
