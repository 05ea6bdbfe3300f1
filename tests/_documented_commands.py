"""Finds the commands in Markdown documents and parses them without running them."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
#: Programs in documents that need not be installed where tests run.
OTHERS = {"torchrun", "accelerate", "cd", "git", "pip", "python", ".venv/bin/python"}


def variables() -> set[str]:
    """The environment variables that the package or the Makefile reads."""
    sources = [ROOT / "Makefile", *(ROOT / "torch_uvm").glob("**/*.py")]
    ours = r"\b(?:TORCH_UVM(?:_[A-Z]+)*|PYTORCH_ENABLE_UNIFIED_MEMORY|PYTHON|OMP_WAIT_POLICY)\b"
    return {name for source in sources for name in re.findall(ours, source.read_text())}


def commands(language: str, source: str) -> Iterator[str]:
    """The commands of a shell block, or those after a `$` in a terminal session."""
    lines = re.sub(r"\\\n\s*", "", source).splitlines()
    if language == "sh":
        yield from (line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    elif language == "":
        yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ "))


class Parsed(Exception):
    """Raised when a command line was parsed, in place of executing it."""


def _parse(arguments: Sequence[str]) -> NoReturn:
    """Passes a command line to the parsers of `python -m torch_uvm` and stops before it is executed. The
    options of `run` are set, because setting them validates them, so the process should end afterwards.

    Raises:
        Parsed: the command line is valid. SystemExit: it is not.
    """
    from torch_uvm import cli
    from torch_uvm.cli import run

    real: Callable[..., argparse.Namespace] = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **options: Any) -> argparse.Namespace:
        found = real(self, *args, **options)
        if self.prog not in (f"python -m torch_uvm{more}" for more in ("", " run", " tools")):
            raise Parsed
        return found

    def begin(module: str | None, words: list[str]) -> None:
        raise Parsed

    setattr(argparse.ArgumentParser, "parse_args", parse_args)  # noqa: B010  (mypy forbids the assignment)
    run.run_program = begin
    status = cli.main(arguments)
    raise AssertionError(f"it was run, and returned {status}")


def check(command: str) -> None:
    """Checks that a command could be run as it is. The process should end afterwards.

    Raises:
        AssertionError, ValueError, SystemExit: it could not.
    """
    words = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        assert name in variables(), f"{name} is not a variable of torch_uvm; known: {sorted(variables())}"
        if name == "TORCH_UVM_CONF":
            from torch_uvm import _C

            _C.load_options(value)
    for word in words:
        # A path must exist in this repository. A bare file name stands for the reader's own script.
        assert not (word.endswith(".py") and "/" in word) or (ROOT / word).is_file(), f"there is no {word}"
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        there = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
        targets = {word for word in words[1:] if "=" not in word}
        assert targets and targets <= there, f"make has no {targets - there or 'first target that is a job'}"
        return
    assert words[0] in OTHERS or shutil.which(words[0]), f"there is no {words[0]}"
    for number, word in enumerate(words[:-1]):
        if word == "-m" and words[number + 1] == "torch_uvm":
            try:
                _parse(words[number + 2 :])
            except Parsed:
                return
