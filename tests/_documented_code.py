"""The code that documents show: found in Markdown, and run.

Before a block an HTML comment, which a reader does not see, may say more:

    <!-- continues -->          it goes on with the names of the block before it
    <!-- first: CODE -->        CODE (one line or more) is run before it, in its namespace
    <!-- not run: WHY -->       it is shown only

A block is a program: it is run in a process of its own, with those that continue it. `print(...)  # True`
claims what is printed, where the comment is made of Python's literals, or begins with `->`; all other
comments are prose.

    python tests/_documented_code.py FILE...    tries the code in them, and prints JSON: see `try_all`

One process imports torch, and forks for each program, and for each command (`_documented_commands.py`).
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

SECONDS = 60  # that a program may take


@dataclass
class Block:
    """What stands between two fences."""

    path: Path
    line: int  #: of its first line of code, from 1
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
    """Every fenced block of a document, in its order.

    Raises:
        ValueError: a comment right before a block is none of ours; a block is not closed.
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
    """The blocks of Python that are run, each with those that continue it."""
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
    """(lines of a call of print, what it is claimed to print each time) for each claim in a program."""
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
    """Takes the place of `print` in a program, and keeps what each line of it printed."""

    by_line: dict[int, list[str]] = field(default_factory=dict)

    def __call__(self, *values: Any, **options: Any) -> None:
        text = io.StringIO()
        print(*values, **(options | {"file": text}))
        self.by_line.setdefault(sys._getframe(1).f_lineno, []).append(text.getvalue().strip())

    def broken(self, source: str) -> list[str]:
        """The claims of a program that has run that do not hold."""
        complaints = []
        for lines, claimed in claims(source):
            seen = [text for line in lines for text in self.by_line.get(line, [])]
            if not seen or any(text != claimed for text in seen):
                complaints.append(f"line {lines[0]} claims {claimed!r} and printed {seen}")
        return complaints


def run_program(program: list[Block]) -> str | None:
    """Runs it here. Returns what is wrong with it; None: nothing."""
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
    """What is wrong with a command of a document; None: nothing."""
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
        os.setsid()  # what it starts ends with it
        os.dup2(2, 1)  # ours has the results
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
    """What is wrong, None if nothing is: of `programs`, by the name of the first block, and of `commands`, by
    the name of the block and the command."""
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
