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
from torch.optim.optimizer import (
    _default_to_fused_or_foreach,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_uvm import _C
from torch_uvm._residency.limits import get_host_limit
from torch_uvm._util.escaping import printable
from torch_uvm._util.frames import place_of
from torch_uvm._util.version import VERSION
from torch_uvm.report import allocation_sites
from torch_uvm.report.facts import Facts
from torch_uvm.report.page import page
from torch_uvm.report.samples import Sampler

PATH, OF = "TORCH_UVM_REPORT", "TORCH_UVM_REPORT_OF"
_WRITTEN_EVERY = 60.0  # seconds, so that a run that is killed has a page, too

_recording: Recording | None = None


def rank_here() -> int | None:
    """The rank of this process under torchrun; None: it has none."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isascii() and rank.isdigit() else None


class Recording:
    """Observes this process from now on; `finish()` writes the page."""

    def __init__(self, path: Path, script: str) -> None:
        self.path = path
        self.script = script
        self.ended = "still running"
        self._process = os.getpid()
        self._began = time.time()
        self._optimizers: set[str] = set()
        self._foreach: set[str] = set()
        self._over_in_steps = 0
        self._over_before_step: int | None = None
        self._writing = threading.Lock()
        self._sampler = Sampler(self._write, _WRITTEN_EVERY)
        self._hooks: list[Any] = []

    def start(self) -> None:
        allocation_sites.start()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._sampler.start()
        atexit.register(self.finish)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._over_before_step = _C.residency_stats()["over_budget"]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._optimizers.add(type(optimizer).__name__)
            if _is_foreach(optimizer):
                self._foreach.add(type(optimizer).__name__)
            if self._over_before_step is not None:
                # 0 if the script has reset the statistics in between.
                self._over_in_steps += max(_C.residency_stats()["over_budget"] - self._over_before_step, 0)
                self._over_before_step = None
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
        for hook in self._hooks:
            hook.remove()
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
        used = _C.in_use()
        here = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count() if used and here is not None else 0
        options = {it["key"]: it["value"] for it in _C.describe_options()}
        asked = _C.requested_budget(0)
        devices = [_C.device_properties(index) for index in range(count)]
        return Facts(
            script=self.script,
            ended=self.ended,
            began=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._began)),
            rank=rank_here(),
            torch_uvm=VERSION,
            torch=torch.__version__,
            python=platform.python_version(),
            backend=_C.backend(),
            devices={index: found["name"] for index, found in enumerate(devices)},
            enabled=_C.is_enabled(),
            samples=self._sampler.samples,
            by_step=list(self._sampler.by_step),
            peaks=dict(self._sampler.peaks),
            most_reserved=self._sampler.most_reserved,
            budgets=dict(self._sampler.budgets),
            asked="nothing asked" if asked is None else asked,
            limit=_C.get_limit(),
            host_limit=get_host_limit(),
            optimizer=options["optimizer"],
            optimizers=sorted(self._optimizers),
            foreach=sorted(self._foreach),
            over_in_steps=self._over_in_steps,
            one_memory=bool(devices) and all(found["one_memory"] for found in devices),
            storages=allocation_sites.storages(),
        )


def _is_foreach(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer updates a group's parameters by the same operators: by request, or by default."""
    for group in optimizer.param_groups:
        asked = group.get("foreach", False)
        if asked is None and not group.get("fused"):
            asked = _default_to_fused_or_foreach(
                group["params"], bool(group.get("differentiable")), use_fused=False
            )[1]
        if asked:
            return True
    return False


def _replace(path: Path, text: str) -> None:
    """Writes the whole text, or leaves what was there before."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def of_rank(path: Path) -> Path:
    """The path of this process's page for a run with ``path``: a rank of torchrun has its own page."""
    rank = rank_here()
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def start(path: Path, script: str) -> Recording:
    """Starts the report of this process, replacing an active one, and of the processes it starts."""
    os.environ[PATH] = str(path)
    os.environ[OF] = "" if rank_here() is None else str(rank_here())
    return _start(Recording(of_rank(path), script))


def current() -> Recording | None:
    """The active recording of this process, if there is one."""
    return _recording


def _start(recording: Recording) -> Recording:
    global _recording
    if _recording is not None:
        _recording.ended = "another report took over"
        _recording.finish()
    _recording = recording
    recording.start()
    return recording


def start_from_environment() -> None:
    """Starts the report that the environment requests; called by `import torch_uvm`.

    Raises:
        ValueError: the path is a folder, or its folder does not exist.
    """
    asked = os.environ.get(PATH, "").strip()
    if not asked or _recording is not None:
        return
    path = Path(asked).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{PATH}={asked!r} in the environment; accepted: a file in a folder that exists")
    script = sys.argv[0] if sys.argv else ""  # absent while the interpreter starts
    script = "python" if script in ("", "-c", "-m") else script
    of = os.environ.get(OF)
    if of is None:
        start(path, script)
    elif rank_here() is not None and str(rank_here()) != of:
        os.environ[OF] = str(rank_here())
        _start(Recording(of_rank(path), script))
