"""The command line: `python -m torch_uvm COMMAND`; each command is a module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch_uvm import report
from torch_uvm._util.arguments import did_you_mean
from torch_uvm.cli import info, plan, plot, replay, run


class _Command(Protocol):
    SUMMARY: str

    def main(self, argv: Sequence[str]) -> int: ...


_TOOLS: dict[str, _Command] = {"plot": plot, "replay": replay}


class _Tools:
    SUMMARY = "draw or repeat recordings"

    def main(self, argv: Sequence[str]) -> int:
        return _dispatch(argv, "python -m torch_uvm tools", _TOOLS)


_COMMANDS: dict[str, _Command] = {"info": info, "run": run, "plan": plan, "tools": _Tools()}


def _dispatch(argv: Sequence[str], program: str, commands: Mapping[str, _Command]) -> int:
    listed = "\n".join(f"  {name:<10}{command.SUMMARY}" for name, command in commands.items())
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} COMMAND ...",
        description=f"commands:\n{listed}",
        epilog=f"{program} COMMAND --help says more",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", help=argparse.SUPPRESS)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    # Only the first word is parsed here: the rest belongs to the command, or to the script that it runs.
    name = parser.parse_args(argv[:1]).command
    if name not in commands:
        hint = did_you_mean(name, commands)
        parser.error(f"unknown command {name!r}{hint}; accepted: {', '.join(commands)}")
    recording = report.current()
    if name != "run" and recording is not None:
        recording.finish(write=False)  # a report in the environment is for scripts, not for commands
    return commands[name].main(argv[1:])


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Returns:
        the exit status; a usage error exits with 2, as argparse does.
    """
    if argv and argv[0] in _TOOLS:  # its name in version 0.1
        print(f"python -m torch_uvm {argv[0]} is now python -m torch_uvm tools {argv[0]}", file=sys.stderr)
        argv = ["tools", *argv]
    return _dispatch(argv, "python -m torch_uvm", _COMMANDS)
