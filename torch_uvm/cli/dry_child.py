"""The process of a dry run: `python -m torch_uvm.cli.dry_child JSON`, started by `_tools/dry_runs.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch_uvm._dry.run import Run
from torch_uvm._tools.cards import Card
from torch_uvm.cli.run import run_program


def main(text: str) -> None:
    """Runs the script of the request, and leaves the process."""
    request = json.loads(text)
    argv = request["argv"]
    cards = [Card(**it) for it in request["cards"]]
    module, words = (argv[1], argv[2:]) if argv[0] == "-m" else (None, argv)
    run = Run(Path(request["folder"]), request["steps"], cards, request["progress"])
    run.run(lambda: run_program(module, words))


if __name__ == "__main__":
    main(sys.argv[1])
