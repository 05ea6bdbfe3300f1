"""`python -m torch_uvm run`: a program runs as under python, except that its memory is managed."""

from __future__ import annotations

import json
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest
from _spawn import Spawn

import torch_uvm
from torch_uvm import cli

EMU = {"TORCH_UVM_DEVICE": "emu"}
RUN = ["-m", "torch_uvm", "run"]

#: Prints all that a program can see of its start.
LOOK = """
import json, sys
import __main__
names = sorted(name for name in globals() if name not in ("json", "sys", "__main__"))
print(json.dumps({
    "argv": sys.argv,
    "path0": sys.path[0],
    "globals": names,
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "doc": __doc__,
    "spec": __spec__ and __spec__.name,
    "loader": type(__loader__).__name__ if not isinstance(__loader__, type) else __loader__.__name__,
    "main": __main__.__dict__ is globals() and sys.modules["__main__"] is __main__,
    "builtins": type(__builtins__).__name__,
}))
"""


def _both(spawn: Spawn, *args: str, check: bool = True) -> list[subprocess.CompletedProcess[str]]:
    """Runs the program under python and under torch_uvm."""
    return [spawn(args=[*start, *args], env=EMU, check=check, fork=start == RUN) for start in ([], RUN)]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """LOOK as a script, a module, a folder and an archive."""
    (tmp_path / "sub" / "package").mkdir(parents=True)
    (tmp_path / "sub" / "look.py").write_text('"""A docstring."""\n' + LOOK)
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "look.py")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "look.py").write_text(LOOK)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(LOOK)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    return tmp_path


class TestRunLooksLikePython:
    @pytest.mark.parametrize(
        "args",
        [
            ["sub/look.py", "--limit", "x", "-m", "--", "a b"],
            ["./link.py"],
            ["-m", "package.look", "--conf", "x"],
            ["folder", "x"],
            ["archive.zip", "x"],
        ],
        ids=lambda args: args[0],
    )
    def test_to_the_program(self, spawn: Spawn, programs: Path, args: list[str]) -> None:
        python, ours = _both(spawn, *args)
        assert json.loads(ours.stdout) == json.loads(python.stdout)

    def test_to_the_shell(self, spawn: Spawn, tmp_path: Path) -> None:
        """Exit status, standard output and standard error, tracebacks included."""
        program = tmp_path / "end.py"
        program.write_text(
            """
import atexit, sys, threading
if __name__ == "__main__":
    atexit.register(lambda: print("at exit", __name__, sys.modules["__main__"].__name__))
def inner(how):
    if how == "status":
        sys.exit(3)
    if how == "message":
        raise SystemExit("a message")
    if how == "error":
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("wrong") from error
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "thread":
        same = lambda: print("thread", inner.__module__, sys.modules["__main__"].inner is inner)
        threading.Timer(0.01, same).start()
    if how == "hook":
        sys.excepthook = lambda kind, value, traceback: print("hook", kind, traceback.tb_frame.f_code.co_name)
        raise ValueError
inner(sys.argv[1])
"""
        )
        for how in ("nothing", "status", "message", "error", "interrupt", "thread", "hook"):
            python, ours = _both(spawn, "end.py", how, check=False)
            assert (ours.returncode, ours.stdout, ours.stderr) == (
                python.returncode,
                python.stdout,
                python.stderr,
            ), how
            if how == "interrupt":
                assert ours.returncode == -signal.SIGINT
            if how == "error":
                assert "torch_uvm" not in ours.stderr and "runpy" not in ours.stderr

    @pytest.mark.parametrize("args", [["missing.py"], ["-m", "missing"], ["broken.py"], ["-m", "broken"]])
    def test_without_a_program(self, spawn: Spawn, tmp_path: Path, args: list[str]) -> None:
        (tmp_path / "broken.py").write_text("def :\n")
        python, ours = _both(spawn, *args, check=False)
        assert ours.returncode == python.returncode != 0
        assert ours.stderr == python.stderr


class TestRun:
    def test_manages_memory_under_the_limit(self, spawn: Spawn, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text(
            """
import torch
x = torch.ones(8, 1024, 1024, device=torch.accelerator.current_accelerator())  # 32 MiB, on a device of 8 MiB
try:
    torch.empty(64, 1024, 1024, device=x.device)
except torch.OutOfMemoryError as error:
    print(error)
import sys
import torch_uvm
print(torch_uvm.is_managed(x), torch_uvm.emulated.counters()["evicted_pages"] == 0, sys.argv)
"""
        )
        done = spawn(
            args=[*RUN, "--limit=100MiB", "--conf", "emulated_memory:8MiB", "script.py", "--limit", "1"],
            env={**EMU, "TORCH_UVM_CONF": "emulated_memory:16MiB"},
        )
        assert "100.00 MiB" in done.stdout
        assert done.stdout.splitlines()[-1] == "True True ['script.py', '--limit', '1']"

    def test_passes_it_on_to_processes_and_pickles_its_classes(self, spawn: Spawn, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text(
            """
import multiprocessing, pickle, sys
import torch, torch_uvm

class Here:
    value = 7

def work(queue, thing):
    import os
    queue.put((type(thing).__module__, thing.value, os.environ["TORCH_UVM"], os.environ["TORCH_UVM_CONF"],
               torch_uvm.is_enabled(), torch_uvm._C.get_limit()))

if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Here()))) is Here
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue, Here()))
    process.start()
    print(queue.get(timeout=240))
    process.join()
    sys.exit(process.exitcode)
"""
        )
        done = spawn(args=[*RUN, "--conf", "limit:1GiB", "script.py"], env=EMU)
        assert done.stdout.strip() == str(("__mp_main__", 7, "1", "limit:1GiB", True, 1024**3))

    @pytest.mark.parametrize("outside", [True, False], ids=["torchrun outside", "torchrun inside"])
    def test_ranks_of_torchrun_have_the_options(self, spawn: Spawn, tmp_path: Path, outside: bool) -> None:
        (tmp_path / "script.py").write_text(
            """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
import torch_uvm
found = (torch_uvm.is_managed(torch.ones(4, device="emu")), torch_uvm._C.get_limit() >> 20,
         torch_uvm._C.requested_budget(0), total.item())
with open(f"{dist.get_rank()}.txt", "w") as file:
    print(*found, file=file)
dist.destroy_process_group()
"""
        )
        options = [*RUN, "--limit", "96MiB", "--budget", "8MiB"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words = [*torchrun, *options, "script.py"] if outside else [*options, *torchrun, "script.py"]
        spawn(args=words, env={**EMU, "TORCH_UVM_CONF": "limit:64MiB,emulated_devices:2"})
        for rank in range(2):
            assert (tmp_path / f"{rank}.txt").read_text().split() == ["True", "96", "8MiB", "3.0"]

    def test_ranks_have_statistics_of_their_own(self, spawn: Spawn, tmp_path: Path) -> None:
        (tmp_path / "script.py").write_text("")
        for rank in ("0", "1"):
            args = ["-m", "torch_uvm", "run", "--stats", "f.json", "script.py"]
            spawn(args=args, env={"TORCH_UVM_DEVICE": "emu", "RANK": rank})
        assert sorted(it.name for it in tmp_path.glob("*.json")) == ["f.rank0.json", "f.rank1.json"]


def _main(*argv: str) -> int:
    return cli.main(argv)


class TestUsage:
    @pytest.mark.parametrize(
        ("argv", "named"),
        [
            (["rnu"], ["'rnu'", "did you mean run?", "info, run, plan, tools"]),
            (["run", "--buget", "4GiB", "script.py"], ["'--buget'", "did you mean --budget?", "--limit"]),
            (["run", "--hostlimit=4GiB", "script.py"], ["'--hostlimit'", "did you mean --host-limit?"]),
            (["run", "--budget", "20G", "script.py"], ["20G", "did you mean 20GiB?"]),
            (["run", "--budget", "0.8", "script.py"], ["0.8", "did you mean 80%?"]),
            (["run", "--budget", "-5GiB", "script.py"], ["-5GiB", "it is negative"]),
            (["run", "--conf", "budget:20G", "script.py"], ["20G", "did you mean 20GiB?"]),
            (["tools", "plot", __file__, "-o", "picture.png"], ["line 1", "not a trace", "record_accesses"]),
            (["info", "--jsno"], ["--jsno"]),
            (["run"], ["SCRIPT", "-m MODULE"]),
            (["run", "--lmit", "4GiB", "script.py"], ["--lmit", "--limit"]),
            (["run", "--limit"], ["--limit", "expected one argument"]),
            (["run", "-m"], ["-m", "expected one argument"]),
            (["run", "--limit", "lots", "script.py"], ["lots", "4GiB"]),
            (["run", "--limit", "-1", "script.py"], ["-1", "4GiB"]),
            (["run", "--budget", "lots", "script.py"], ["budget", "lots", "80%", "auto"]),
            (["run", "--host-limit", "lots", "script.py"], ["host_limit", "lots", "64GiB"]),
            (["run", "--conf", "limt:4GiB", "script.py"], ["limt", "limit"]),
        ],
        ids=" ".join,
    )
    def test_errors_name_the_word_and_what_is_accepted(
        self, capsys: pytest.CaptureFixture[str], argv: list[str], named: list[str]
    ) -> None:
        torch_uvm._C.load_options("")  # as in a new process
        before = torch_uvm._C.describe_options()
        with pytest.raises(SystemExit) as caught:
            _main(*argv)
        assert caught.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("usage: python -m torch_uvm")
        for part in named:
            assert part in message
        assert not torch_uvm.is_enabled() and torch_uvm._C.describe_options() == before

    def test_without_a_command_it_lists_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert _main() == 2
        listed = capsys.readouterr().err
        assert all(f"  {name} " in listed for name in ("info", "run", "plan", "tools"))

    @pytest.mark.parametrize("argv", [["--help"], ["info", "--help"], ["run", "--help"]], ids=" ".join)
    def test_help(self, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            _main(*argv)
        assert not caught.value.code
        assert "python -m torch_uvm" in capsys.readouterr().out
