"""The command line: `python -m torch_uvm COMMAND`; each command is a module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from torch_uvm import report
from torch_uvm._util.arguments import did_you_mean
from torch_uvm.cli import info, plan, plot, replay, run


class _Command(Protocol):
    SUMMARY: str

    def main(self, argv: Sequence[str]) -> int: ...


_COMMANDS: dict[str, _Command] = {
    "info": info,
    "run": run,
    "plan": plan,
    "plot": plot,
    "replay": replay,
}


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<10}{module.SUMMARY}" for name, module in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m torch_uvm",
        usage="python -m torch_uvm COMMAND ...",
        description=f"commands:\n{commands}",
        epilog="python -m torch_uvm COMMAND --help says more",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Returns:
        the exit status; a usage error exits with 2, as argparse does.
    """
    parser = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    # Only the first word is parsed here: the rest belongs to the command, or to the script that it runs.
    name = parser.parse_args(argv[:1]).command
    if name not in _COMMANDS:
        hint = did_you_mean(name, _COMMANDS)
        parser.error(f"unknown command {name!r}{hint}; accepted: {', '.join(_COMMANDS)}")
    recording = report.current()
    if name != "run" and recording is not None:
        recording.finish(write=False)  # a report in the environment is for scripts, not for commands
    return _COMMANDS[name].main(argv[1:])
