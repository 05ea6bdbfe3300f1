"""Reports of runs: `python -m torch_uvm run --report out.html script.py` (docs/plan.md).

A process with a report has a `Recording` from its start to its end. The processes that it starts are told by
the environment, like the switch and the options:

TORCH_UVM_REPORT     the page's path. A rank of torchrun writes beside it, `out.rank0.html`
TORCH_UVM_REPORT_OF  set by this package: the rank of the process whose page that is, or empty

Other children have no page.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_uvm import _C
from torch_uvm._residency.limits import get_host_limit
from torch_uvm._util.escaping import printable
from torch_uvm._util.files import of_rank, output_file, rank_here
from torch_uvm._util.frames import place_of
from torch_uvm._util.version import VERSION
from torch_uvm.report import allocation_sites
from torch_uvm.report.facts import Facts
from torch_uvm.report.page import page
from torch_uvm.report.samples import Sampler

PATH, OF = "TORCH_UVM_REPORT", "TORCH_UVM_REPORT_OF"

_recording: Recording | None = None


class Recording:
    """Observes this process from now on; `finish()` writes the page."""

    def __init__(self, path: Path, script: str) -> None:
        self.path = of_rank(path)
        self.script = script
        self.ended = "still running"
        self._process = os.getpid()
        self._began = time.strftime("%Y-%m-%d %H:%M:%S")
        self._writing = threading.Lock()
        self._sampler = Sampler(self._write)
        allocation_sites.start()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._sampler.start()
        atexit.register(self.finish)

    def _after_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._sampler.mark_step()

    def note_error(self, error: BaseException) -> None:
        """Notes how the script ended. Messages may hold secrets: only an out-of-memory error is quoted."""
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) or error.code is None else 1
            self.ended = f"ended with exit status {status or 0}"
            return
        place = place_of(error.__traceback__)
        self.ended = f"ended by {type(error).__name__}" + (f" at {place}" if place else "")
        if isinstance(error, torch.OutOfMemoryError):
            self.ended += f": {str(error).splitlines()[0] if str(error) else ''}"

    def finish(self, *, write: bool = True) -> None:
        """Writes the page. In a forked child, and a second time, it does nothing. Raises nothing.

        Args:
            write: False: without a page.
        """
        global _recording
        if os.getpid() != self._process or _recording is not self:
            return
        _recording = None
        atexit.unregister(self.finish)
        self._hook.remove()
        self._sampler.stop()
        allocation_sites.stop()
        if self.ended == "still running":
            self.ended = "ended"
        if write:
            self._write()

    def _write(self) -> None:
        with self._writing:
            try:
                _replace(self.path, page(self._facts()))
            except Exception as error:  # of the disk or of ours: the program's exit status stays its own
                print(printable(f"torch_uvm: no report in {self.path}: {error}"), file=sys.stderr)

    def _facts(self) -> Facts:
        in_use = _C.in_use() and torch.accelerator.current_accelerator() is not None
        devices = [
            _C.device_properties(it) for it in range(torch.accelerator.device_count() if in_use else 0)
        ]
        names = {index: found["name"] for index, found in enumerate(devices)}
        options = {it["key"]: it["value"] for it in _C.describe_options()}
        rank = rank_here()
        return Facts(
            title=self.script if rank is None else f"{self.script}, rank {rank}",
            ended=f"{self._began}; {self.ended}",
            settings={
                **{name: options[name] for name in ("budget", "limit", "host_limit", "optimizer")},
                "accelerator": ", ".join([_C.backend(), *names.values()]),
                "versions": f"torch_uvm {VERSION}, torch {torch.__version__}, "
                f"Python {platform.python_version()}",
            },
            backend=_C.backend(),
            devices=names,
            enabled=_C.is_enabled(),
            samples=self._sampler.samples,
            step_ends=self._sampler.step_ends,
            peaks=self._sampler.peaks,
            most_reserved=self._sampler.most_reserved,
            budgets=self._sampler.budgets,
            limit=_C.get_limit(),
            host_limit=get_host_limit(),
            one_memory=bool(devices) and all(found["one_memory"] for found in devices),
            storages=allocation_sites.storages(),
        )


def _replace(path: Path, text: str) -> None:
    """Writes the whole text, or leaves what was there before."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def start(path: Path, script: str) -> Recording:
    """Starts the report of this process, replacing an active one, and of the processes it starts."""
    global _recording
    os.environ[PATH] = str(path)
    os.environ[OF] = "" if rank_here() is None else str(rank_here())
    if _recording is not None:
        _recording.ended = "another report took over"
        _recording.finish()
    _recording = Recording(path, script)
    return _recording


def current() -> Recording | None:
    """The active recording of this process, if there is one."""
    return _recording


def start_from_environment() -> None:
    """Starts the report that the environment requests; called by `import torch_uvm`.

    Raises:
        ValueError: the path is a folder, or its folder does not exist.
    """
    asked = os.environ.get(PATH, "").strip()
    of, rank = os.environ.get(OF), rank_here()
    another_rank = of is not None and rank is not None and str(rank) != of
    if not asked or _recording is not None or not (of is None or another_rank):
        return
    try:
        path = output_file(asked)
    except OSError as error:
        raise ValueError(f"{PATH}={asked!r} in the environment: {error}") from None
    script = sys.argv[0] if sys.argv else ""  # absent while the interpreter starts
    start(path, "python" if script in ("", "-c", "-m") else script)
