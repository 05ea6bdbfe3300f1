"""What a process of a dry run does: it runs a program dry, says what went wrong, and ends."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from torch_uvm._dry.results import NoResult
from torch_uvm._dry.run import Run
from torch_uvm._util.frames import without_our_frames

_LONGEST = 200  # characters of an exception
_GPU_WORDS = ("CUDA", "cuda", "NVTX", "NVIDIA", "cuDNN", "nvml", "NVML", "NCCL")


def run_here(run: Run, program: Callable[[], object]) -> NoReturn:
    """Leaves the process. What ends the run is in error.json."""
    run.begin()
    try:
        program()
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            _tell(error, run.folder)
    run.finish(ended=True)


def _tell(error: BaseException, folder: Path) -> None:
    shown = without_our_frames(error.__traceback__)
    traceback.print_exception(type(error), error, shown)
    if isinstance(error, NoResult):
        message = str(error)
    elif isinstance(error, SystemExit):
        message = f"the script exited with status {error.code}, before the steps that a plan needs"
    else:
        message = _of_exception(error, traceback.extract_tb(shown))
    (folder / "error.json").write_text(json.dumps(message))


def _of_exception(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """What a script has raised, where, and what to do about it."""
    said = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    if len(said) > _LONGEST:
        said = said[:_LONGEST].rstrip() + "..."
    own = [it for it in frames if "site-packages" not in it.filename and not it.filename.startswith("<")]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    if any(word in said for word in _GPU_WORDS):
        todo = (
            "This needs a real GPU, and a dry run has none. Leave it out for the plan, or record a trace on "
            "a GPU and plan it with --from (docs/annex.md)"
        )
    else:
        todo = (
            "Run the script without plan: if it raises there too, correct it first; if not, "
            "docs/plan.md says what a dry run cannot give it"
        )
    return f"the script raised {said.rstrip('.')}{place}. {todo}"
