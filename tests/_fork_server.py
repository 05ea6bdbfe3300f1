"""Starts programs of tests as forks of a server that has imported torch, for 2.3 s of CPU time.

In the child torch is not in `sys.modules` yet. The program's own first `import torch` finds it, and then
calls the entry points of `torch.backends`, as in a process that was started for the program.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

FOLDER = str(Path(__file__).resolve().parent)
TORCH = "torch"


def is_of_torch(name: str) -> bool:
    return name == TORCH or name.startswith(f"{TORCH}.")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives torch's modules back at the first import of one."""

    def __init__(self) -> None:
        self._modules = {name: sys.modules.pop(name) for name in [*sys.modules] if is_of_torch(name)}
        self._spec = self._modules[TORCH].__spec__

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == TORCH else None

    def create_module(self, _: object) -> ModuleType:
        return self._modules[TORCH]

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        sys.modules.update(self._modules)
        module.default_generator.seed()
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()


def serve(file: int) -> CodeType:
    """Forks a child for each request. Returns its code in a child, and never in the server."""
    import gc

    if __import__(TORCH).version.cuda is not None:
        os._exit(0)  # with CUDA each program has a process of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which closes the connection
    connection = socket.socket(fileno=file)
    requests = connection.makefile("r")
    gc.collect()
    gc.freeze()
    while line := requests.readline():
        child = os.fork()
        if child == 0:
            os.close(connection.detach())
            return begin(json.loads(line))
        connection.sendall(b"%d\n" % child)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def begin(request: dict[str, Any]) -> CodeType:
    """Makes this process that of the request."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, path in ((1, request["stdout"]), (2, request["stderr"])):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, file)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.orig_argv[:] = request["command"]
    sys.path.remove(FOLDER)
    sys.meta_path.insert(0, Finder())
    del sys.modules[__name__]
    _, option, *arguments = request["command"]
    sys.argv[:] = [option, *arguments]
    if option == "-c":
        del sys.argv[1]
        return compile(arguments[0], "<string>", "exec")
    if option == "-m":
        del sys.argv[1]
        sys.path[0] = os.getcwd()
        return compile(f"__import__('runpy')._run_module_as_main({arguments[0]!r})", "<string>", "exec")
    sys.path[0] = str(Path(option).resolve().parent)
    vars(sys.modules["__main__"]).update(__file__=option, __cached__=None)
    return compile(Path(option).read_bytes(), option, "exec")


class Programs:
    """A server, and the connection to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            path = f"__import__('sys').path.insert(0, {FOLDER!r})"
            code = f"exec({path} or __import__('_fork_server').serve({theirs.fileno()}))"
            self._server = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection, self._replies = ours, ours.makefile("r")
        self._one = threading.Lock()
        atexit.register(self._end, os.getpid())

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:  # and not a child of a test
            self._replies.close()
            self._connection.close()
            self._server.wait()

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        timeout: float,
        files: Path,
    ) -> subprocess.CompletedProcess[str] | None:
        """None: another program of this server is running, or it has ended.

        Raises:
            subprocess.TimeoutExpired
        """
        if not self._one.acquire(blocking=False):
            return None
        try:
            outputs = [files / "stdout", files / "stderr"]
            for path in outputs:
                path.touch()
            request = {"command": list(command), "cwd": str(folder), "environment": dict(environment)}
            request |= {path.name: str(path) for path in outputs}
            try:
                self._connection.sendall(json.dumps(request).encode() + b"\n")
                child = self._replies.readline()
            except OSError:
                return None
            if not child:
                return None
            late = threading.Event()

            def end() -> None:
                late.set()
                os.kill(int(child), signal.SIGKILL)

            timer = threading.Timer(timeout, end)
            timer.start()
            status = int(self._replies.readline())
            timer.cancel()
            stdout, stderr = (path.read_text() for path in outputs)
            if late.is_set():
                raise subprocess.TimeoutExpired(list(command), timeout, stdout, stderr)
            return subprocess.CompletedProcess(list(command), status, stdout, stderr)
        finally:
            self._one.release()
