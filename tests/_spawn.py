"""Runs Python snippets in processes of their own, for switches that apply to a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from _fork_server import Programs

ROOT = Path(__file__).resolve().parent.parent
# Variables that would enable or change torch_uvm in a child that did not set them.
OURS = ("TORCH_UVM", "PYTORCH_ENABLE_UNIFIED_MEMORY")
# Python 3.12 and later warn of every fork of a process with threads. PyTorch and CUDA always have threads.
FORK_WARNING = "ignore:This process (pid=:DeprecationWarning"
DEVICE = "TORCH_UVM_DEVICE"

Run = Callable[..., subprocess.CompletedProcess[str]]


def python_path(*folders: Path) -> str:
    """A PYTHONPATH: these folders, then this process's, then the repository.

    A child imports the same torch and the same torch_uvm as this process, which may be a wheel's
    (scripts/versions.py).
    """
    return os.pathsep.join(map(str, filter(None, [*folders, os.environ.get("PYTHONPATH"), ROOT])))


@cache
def programs() -> Programs:
    return Programs(clean_environment())


def clean_environment() -> dict[str, str]:
    """This process's, without our variables."""
    found = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    others = os.environ.get("PYTHONWARNINGS")
    return found | {"PYTHONWARNINGS": f"{others},{FORK_WARNING}" if others else FORK_WARNING}


def may_fork(code: str | None, args: Sequence[str], env: Mapping[str, str | None]) -> bool:
    """Whether a process that is started for the program would be the same. Variables of others may be read
    before Python begins."""
    if any(not key.startswith(OURS) for key in env):
        return False
    return code is not None or args[0].endswith(".py") or list(args[:2]) == ["-m", "torch_uvm"]


class Spawn:
    """Runs Python in a fresh process and an empty folder, with none of our variables set."""

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
        fork: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python -c code args...`, or, without code, `python args...`.

        code: may be indented
        env: added to this process's environment; None removes a variable
        check: raise unless the exit status is 0; the message has the output
        timeout: seconds
        fork: whether the process may be a fork of one that has imported torch (_fork_server.py)
        """
        environment = clean_environment()
        if DEVICE in os.environ:  # beside a GPU, children use the emulator too if this process was told to
            environment[DEVICE] = os.environ[DEVICE]
        for key, value in (env or {}).items():
            if value is None:
                environment.pop(key, None)
            else:
                environment[key] = value
        command = [sys.executable, *(["-c", textwrap.dedent(code)] if code is not None else []), *args]
        done = None
        if fork and may_fork(code, args, env or {}):
            with tempfile.TemporaryDirectory() as files:
                done = programs().run(command, self.folder, environment, timeout, Path(files))
        if done is None:
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

    def after(self, prelude: str, **options: Any) -> Run:
        """A function that runs code after the prelude, with these options unless its call has its own."""
        return lambda code, **own: self(prelude + textwrap.dedent(code), **{**options, **own})
