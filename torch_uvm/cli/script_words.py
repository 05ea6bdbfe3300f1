"""The words of commands that take a script, or `-m` and a module, with its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch_uvm._util.arguments import did_you_mean


def split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of a command, and the rest: from the script on, or after the module's name.

    An option and its value become one word, so that a value may begin with a minus sign. An unknown option
    ends the command: the word after it could be its value, or the script.
    """
    with_a_value = [name for it in parser._actions if it.nargs != 0 for name in it.option_strings]
    ours: list[str] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word.startswith("-m"):
            end = index + (2 if word == "-m" else 1)
            return [*ours, *argv[index:end]], list(argv[end:])
        if word == "--":
            return ours, list(argv[index + 1 :])
        if not word.startswith("-") or word == "-":
            return ours, list(argv[index:])
        name, given, _ = word.partition("=")
        if name not in (*with_a_value, "-h", "--help"):
            meant = did_you_mean(name, with_a_value)
            parser.error(f"unknown option {name!r}{meant}; accepted: {', '.join(with_a_value)}")
        if given or name not in with_a_value or index + 1 == len(argv):
            ours.append(word)
            index += 1
        else:
            ours.append(f"{word}={argv[index + 1]}")
            index += 2
    return ours, []
