"""The process of a dry run: `python -m torch_uvm.cli.dry_child JSON`, started by `_tools/dry_runs.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch_uvm._dry.run import Run
from torch_uvm._tools.cards import Card
from torch_uvm.cli.run import _run_module, _run_script


def main(text: str) -> None:
    """Runs the script of the request, and leaves the process."""
    request = json.loads(text)
    argv = request["argv"]
    cards = [Card(**it) for it in request["cards"]]

    def program() -> None:
        if argv[0] == "-m":
            sys.argv = ["-m", *argv[2:]]
            _run_module(argv[1])
        else:
            sys.argv = argv
            _run_script(argv[0])

    Run(Path(request["folder"]), request["steps"], cards, request["progress"]).run(program)


if __name__ == "__main__":
    main(sys.argv[1])
