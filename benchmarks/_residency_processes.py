"""Child processes that import torch in advance and then wait for their column."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _residency_limits import LIMIT

HERE = Path(__file__).resolve().parent
CHILD = HERE / "_residency_child.py"


def environment(rehearsal: bool, imports_torch_uvm: bool) -> dict[str, str]:
    """The environment of a child: torch_uvm is not enabled implicitly, and its limit holds from its first
    use.

    rehearsal: on the emulated accelerator
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TORCH_UVM", "PYTORCH_ENABLE_UNI"))
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), kept.get("PYTHONPATH")]))
    kept |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if imports_torch_uvm:
        kept["TORCH_UVM_CONF"] = f"limit:{LIMIT}"
        if rehearsal:
            kept["TORCH_UVM_DEVICE"] = "emu"
    return kept


class Child:
    """A child process: start, command, wait, and kill with all its descendants."""

    def __init__(self, log: Path, variables: Mapping[str, str], ready: Path, program: Path = CHILD) -> None:
        """ready: a file that the child creates after its imports"""
        self.log, self._ready = log, ready
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(ready)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(variables),
                process_group=0,  # so that its descendants can be killed with it
            )

    def wait_ready(self, seconds: float) -> None:
        """Waits until the child has imported or exited, or until the timeout."""
        deadline = time.monotonic() + seconds
        while not self._ready.exists() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def tell(self, spec: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child has died; `wait` reports how
            self._process.stdin.write(json.dumps(spec).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, seconds: float) -> str | None:
        """Waits for the end of the process.

        \\return the error, or None
        """
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return f"hung: killed after {seconds:.0f} s"
        if status < 0:
            return f"died of {signal.Signals(-status).name}{self._last_line()}"
        return None if status == 0 else f"failed with status {status}{self._last_line()}"

    def end(self) -> None:
        """Kills the process, if it is still alive, and its descendants."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:200]}" if lines else ""
