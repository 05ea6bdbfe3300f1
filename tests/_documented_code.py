"""Finds code blocks in Markdown documents and runs them.

An HTML comment before a block, which is not rendered, sets options:

    <!-- continues -->          the block continues the program of the previous block
    <!-- first: CODE -->        CODE (one line or more) runs first, in the block's namespace
    <!-- not run: WHY -->       the block is not run

A block is a program: it runs in its own process, together with the blocks that continue it. A comment after
`print(...)` claims the printed text if it consists of Python literals (`# True`) or begins with `->`. All
other comments are prose.

python tests/_documented_code.py FILE...    tests the code in the files and prints JSON, see `try_all`

One process imports torch and forks for each program and each command (`_documented_commands.py`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import re
import select
import signal
import sys
import tempfile
import tokenize
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _documented_commands import check, commands

SECONDS = 60  # maximum for a program


@dataclass
class Block:
    """A fenced code block."""

    path: Path
    line: int  #: number of its first line of code, from 1
    language: str
    source: str
    first: str = ""
    continues: bool = False
    not_run: str | None = None

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.line}"


_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[^\n`]*)$")
_COMMENT = re.compile(r"<!--((?:(?!-->).)*)-->\s*\Z", re.DOTALL)


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a document, in order.

    Raises:
        ValueError: a comment right before a block is not one of ours, or a block is not closed.
    """
    found = []
    lines = path.read_text().splitlines()
    index = start = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening is None:
            index += 1
            continue
        indent, fence = opening["indent"], opening["fence"]
        end = next((i for i in range(index + 1, len(lines)) if lines[i].strip() == fence), None)
        if end is None:
            raise ValueError(f"{path.name}:{index + 1}: the block is not closed")
        source = "\n".join(line.removeprefix(indent) for line in lines[index + 1 : end]) + "\n"
        block = Block(path, index + 2, opening["language"].strip(), source)
        comment = _COMMENT.search("\n".join(lines[start:index]))
        if comment is not None:
            _mark(block, comment[1].strip())
        found.append(block)
        index = start = end + 1
    return found


def _mark(block: Block, comment: str) -> None:
    kind, _, rest = comment.partition(":")
    if comment == "continues":
        block.continues = True
    elif kind == "first" and rest.strip():
        block.first = rest.strip() + "\n"
    elif kind == "not run" and rest.strip():
        block.not_run = rest.strip()
    else:
        raise ValueError(f"{block.name}: <!-- {comment} --> is no mark of a block that this knows")


def programs(found: list[Block]) -> list[list[Block]]:
    """The programs: each Python block that is run, with the blocks that continue it."""
    made: list[list[Block]] = []
    for block in found:
        if block.language != "python" or block.not_run is not None:
            continue
        if not block.continues:
            made.append([block])
        elif made:
            made[-1].append(block)
        else:
            raise ValueError(f"{block.name} continues nothing")
    return made


def claims(source: str) -> Iterator[tuple[range, str]]:
    """(lines of a call of print, claimed output of each call) for each claim in a program."""
    comments = {
        token.end[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert node.end_lineno is not None
            comment = comments.get(node.end_lineno, "")
            if comment.startswith("->"):
                yield range(node.lineno, node.end_lineno + 1), comment.removeprefix("->").strip()
            elif comment and _literals(comment):
                yield range(node.lineno, node.end_lineno + 1), comment


def _literals(text: str) -> bool:
    def literal(word: str) -> bool:
        try:
            ast.literal_eval(word)
        except (ValueError, SyntaxError):
            return False
        return True

    return literal(text) or all(map(literal, text.split()))


@dataclass
class Printed:
    """Replaces `print` in a program and records the output by line."""

    by_line: dict[int, list[str]] = field(default_factory=dict)

    def __call__(self, *values: Any, **options: Any) -> None:
        text = io.StringIO()
        print(*values, **(options | {"file": text}))
        self.by_line.setdefault(sys._getframe(1).f_lineno, []).append(text.getvalue().strip())

    def broken(self, source: str) -> list[str]:
        """After the run: the claims that differ from the output."""
        complaints = []
        for lines, claimed in claims(source):
            seen = [text for line in lines for text in self.by_line.get(line, [])]
            if not seen or any(text != claimed for text in seen):
                complaints.append(f"line {lines[0]} claims {claimed!r} and printed {seen}")
        return complaints


def run_program(program: list[Block]) -> str | None:
    """Runs a program in this process. Returns the error, or None."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    for block in program:
        printed = Printed()
        main.__dict__["print"] = printed
        try:
            exec(compile(block.first, f"{block.name} (first)", "exec"), main.__dict__)
            exec(compile(block.source, block.name, "exec"), main.__dict__)
        except BaseException:
            return f"{block.name}\n{traceback.format_exc()}"
        broken = printed.broken(block.source)
        if broken:
            return f"{block.name}\n" + "\n".join(broken)
    return None


def try_command(command: str) -> str | None:
    """Checks a command of a document. Returns the error, or None."""
    try:
        check(command)
    except BaseException:
        return f"{command}\n{traceback.format_exc()}"
    return None


def _in_a_child(what: Callable[[], str | None], seconds: float = SECONDS) -> str | None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()  # so that its descendants can be killed with it
        os.dup2(2, 1)  # stdout of the parent carries the results
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            wrong = what()
            os.chdir("/")
        with os.fdopen(writing, "w") as end:
            end.write(json.dumps(wrong))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as end:
        answer = end.read() if select.select([end], [], [], seconds)[0] else ""
    if not answer:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return json.loads(answer) if answer else f"no answer in {seconds} s; wait status {status}"


def try_all(paths: list[Path]) -> dict[str, dict[str, str | None]]:
    """The errors, None for success: of `programs` by the name of the first block, of `commands` by the name
    of the block and the command."""
    found = [block for path in paths for block in blocks(path)]
    return {
        "programs": {
            program[0].name: _in_a_child(functools.partial(run_program, program))
            for path in paths
            for program in programs(blocks(path))
        },
        "commands": {
            f"{block.name} {command}": _in_a_child(functools.partial(try_command, command))
            for block in found
            for command in commands(block.language, block.source)
        },
    }


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  (once, for all of them: optimizers import it)

    import torch_uvm  # noqa: F401

    sys.stdout.write(json.dumps(try_all([Path(name).resolve() for name in sys.argv[1:]]), indent=1))
