"""`python -m torch_uvm run`: a script or module as python runs it, with managed memory on.

The program gets its own `__main__`, `sys.argv` and `sys.path[0]`; its exit status and tracebacks are those
of a run without torch_uvm. The environment passes the switch and the options on to the processes that it
starts (workers, the ranks of torchrun).
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import importlib.machinery
import json
import os
import pkgutil
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_uvm
from torch_uvm import _C, report
from torch_uvm._residency.budget import warn_of_few_bytes
from torch_uvm._util.files import of_rank, output_argument
from torch_uvm._util.frames import without_our_frames
from torch_uvm.cli.script_words import split

#: If not, `python -m` put the current directory first in sys.path, where the program's is to be.
_IS_SAFE_PATH = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
SUMMARY = "run a script or module with managed memory on"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_uvm run",
        usage="python -m torch_uvm run [OPTION ...] (SCRIPT | -m MODULE) [ARG ...]",
        description="Runs SCRIPT (or a directory or zip file with a __main__.py) or MODULE as python does, "
        "with managed memory on.",
        allow_abbrev=False,
    )
    parser.add_argument("--limit", metavar="BYTES", help="the most managed memory, such as 4GiB, or none")
    parser.add_argument("--conf", metavar="KEY:VALUE,...", help="options, in place of TORCH_UVM_CONF")
    parser.add_argument(
        "--budget",
        metavar="BUDGET",
        help="managed memory resident on each device: such as 20GiB or 80%%, auto, or none for the driver's",
    )
    parser.add_argument(
        "--host-limit",
        metavar="BYTES",
        help="the most pinned memory for evicted storages: such as 64GiB, auto, or none",
    )
    parser.add_argument(
        "--optimizer",
        metavar="WHEN",
        help="when an optimizer's step updates large parameters: in_place, deferred (each at its next use), "
        "or auto (deferred once memory is short)",
    )
    parser.add_argument(
        "--stats",
        metavar="FILE",
        type=output_argument,
        help="write memory statistics there at exit, as JSON; torchrun's ranks write FILE.rank0.json, ...",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=output_argument,
        help="write a page of the run there, such as out.html; torchrun's ranks write out.rank0.html, ...",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module")
    return parser


def _turn_on(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Options that are given replace those of --conf, or of TORCH_UVM_CONF, here and in child processes."""
    conf = os.environ.get("TORCH_UVM_CONF", "") if arguments.conf is None else arguments.conf
    try:
        _C.load_options(conf)
        pairs = [pair.partition(":") for pair in conf.split(",") if pair.strip()]
        options = {key.strip(): value.strip() for key, _, value in pairs}
        for key in ("limit", "budget", "host_limit", "optimizer"):
            if (value := getattr(arguments, key)) is not None:
                options[key] = value
        conf = ",".join(f"{key}:{value}" for key, value in options.items())
        _C.load_options(conf)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warn_of_few_bytes(_C.requested_budget(0) or "auto", "budget")
            torch_uvm.enable()
        for warning in said:
            print(f"{parser.prog}: warning: {warning.message}", file=sys.stderr)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    os.environ |= {"TORCH_UVM": "1", "TORCH_UVM_CONF": conf}


def run_program(module: str | None, words: list[str]) -> None:
    """Runs a module with arguments, or without one a script, which is the first word, as python does."""
    if module is None:
        sys.argv = words
        _run_script(words[0])
    else:
        sys.argv = ["-m", *words]
        _fresh_main()
        _run_as_main(module, True)


def _fresh_main() -> types.ModuleType:
    """A new `__main__`, like the interpreter's. It is kept: threads and exit handlers outlive the code."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        module.__dict__.update(__annotations__={})
    sys.modules["__main__"] = module
    return module


def _run_script(script: str) -> None:
    # Like the interpreter, only join: it does not normalise the path.
    path = os.path.join(os.getcwd(), script)
    if pkgutil.get_importer(path) is not None:  # a directory, or an archive
        if _IS_SAFE_PATH:
            sys.path.insert(0, path)
        else:
            sys.path[0] = path
        _fresh_main()
        _run_as_main("__main__", False)
        return
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    if not _IS_SAFE_PATH:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = _fresh_main()
    module.__file__ = path
    module.__dict__.update(__cached__=None)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _run_as_main(name: str, alter_argv: bool) -> None:
    # The function that `python -m` calls. Unlike runpy.run_module it leaves `__main__` in place afterwards.
    run: Callable[[str, bool], Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(name, alter_argv)


def _hide_our_frames(error: BaseException) -> None:
    """Removes the frames of `run` from the error's traceback."""
    traceback = without_our_frames(error.__traceback__)
    hook = sys.excepthook

    def shortened(kind: type[BaseException], value: BaseException, whole: types.TracebackType | None) -> None:
        if value is error:
            whole = traceback
            value = value.with_traceback(whole)
        hook(kind, value, whole)

    sys.excepthook = shortened


def _write_stats(path: Path) -> None:
    """Writes `memory_stats()` and `stats()`, and on the emulated accelerator its counters and timelines.

    Bytes, and modelled microseconds. A point of a timeline is one of `emulated.timeline`.

    Raises:
        OSError: the file cannot be written.
    """
    emulated = _C.backend() == "emulated"
    found = {
        "backend": _C.backend(),
        "limit": _C.get_limit(),
        "managed_bytes": _C.managed_bytes(),
        "peak_managed_bytes": _C.peak_managed_bytes(),
        "memory": _C.memory_stats(None),
        "residency": _C.residency_stats(),
        "emulated": _emulated() if emulated else None,
    }
    path.write_text(json.dumps(found) + "\n")


def _emulated() -> dict[str, Any]:
    devices = [
        {
            "index": index,
            "memory": _C.device_properties(index)["total_memory"],
            "counters": _C.emu_counters(index),
            "resident_bytes": _C.emu_resident_bytes(index),
            "peak_resident_bytes": _C.emu_peak_resident_bytes(index),
            "timeline": _C.emu_timeline(index),
        }
        for index in range(torch.accelerator.device_count())
    ]
    return {"time_us": _C.emu_time_us(), "counters": _C.emu_counters(None), "devices": devices}


def main(argv: Sequence[str]) -> int:
    """Turns the switch on and becomes the program; its exceptions, SystemExit included, pass through."""
    parser = _parser()
    head, rest = split(parser, argv)
    arguments = parser.parse_args(head)
    if arguments.module is None and not rest:
        parser.error("a SCRIPT or -m MODULE is needed")
    _turn_on(parser, arguments)
    if arguments.stats is not None:
        # Not `finally`: the program's threads may outlive its main module; they are joined before this.
        atexit.register(_write_stats, of_rank(arguments.stats))
    name = arguments.module or rest[0]
    if arguments.report is not None:
        report.start(arguments.report, name)
    recording = report.current()  # the environment may have started one
    if recording is not None:
        recording.script = name
    try:
        run_program(arguments.module, rest)
    except BaseException as error:
        if recording is not None:
            recording.note_error(error)
        if not isinstance(error, SystemExit):
            _hide_our_frames(error)
        raise
    return 0
