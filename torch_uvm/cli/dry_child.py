"""The process of a dry run: `python -m torch_uvm.cli.dry_child JSON`, started by `_tools/dry_runs.py`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from torch_uvm._dry.results import NoResult
from torch_uvm._dry.run import Run, card_of
from torch_uvm.cli.run import _run_module, _run_script, _without_our_frames


def main(text: str) -> None:
    """Runs the script of the request, and leaves the process. What ends the run is in error.json."""
    request = json.loads(text)
    folder = Path(request["folder"])
    report = os.fdopen(request["progress"], "w", buffering=1)
    run = Run(folder, request["steps"], card_of(request["card"]), report)
    argv = request["argv"]
    run.begin()
    try:
        if argv[0] == "-m":
            sys.argv = ["-m", *argv[2:]]
            _run_module(argv[1])
        else:
            sys.argv = argv
            _run_script(argv[0])
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            _tell(error, folder)
    run.finish(ended=True)


def _tell(error: BaseException, folder: Path) -> None:
    shown = _without_our_frames(error.__traceback__)
    traceback.print_exception(type(error), error, shown)
    message = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, NoResult):
        message = str(error)
    elif isinstance(error, SystemExit):
        message = f"the script exited with status {error.code}"
    (folder / "error.json").write_text(json.dumps({"message": message}))


if __name__ == "__main__":
    main(sys.argv[1])
