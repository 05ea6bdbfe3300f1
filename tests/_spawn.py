"""Python snippets in processes of their own: for switches that hold for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

# What would turn torch_uvm on, or change it, in a child that did not ask for it.
OURS = ("TORCH_UVM", "PYTORCH_ENABLE_UNIFIED_MEMORY")
# Python 3.12 and later warn of every fork of a process with threads; PyTorch's and CUDA's are always there.
FORK_WARNING = "ignore:This process (pid=:DeprecationWarning"
DEVICE = "TORCH_UVM_DEVICE"


class Spawn:
    """Runs Python in a fresh process, in a folder of its own, with none of our variables set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self,
        code: str | None = None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        check: bool = True,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python -c code args...`, or, without code, `python args...`.

        code: indented as its test is, if that suits
        env: added to this process's environment; None takes a variable away
        check: fail unless the exit status is 0; what the process wrote is in the message
        timeout: seconds
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        if DEVICE in os.environ:  # who asks for the emulator beside a GPU asks for it in children, too
            environment[DEVICE] = os.environ[DEVICE]
        others = os.environ.get("PYTHONWARNINGS")
        environment["PYTHONWARNINGS"] = f"{others},{FORK_WARNING}" if others else FORK_WARNING
        for key, value in (env or {}).items():
            if value is None:
                environment.pop(key, None)
            else:
                environment[key] = value
        command = [sys.executable, *(["-c", textwrap.dedent(code)] if code is not None else []), *args]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done
