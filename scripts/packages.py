"""Builds the source distribution and the wheel, and tests them outside of the repository.

    python scripts/packages.py dist
    python scripts/packages.py --try dist [torch==2.13.0 ...]     a wheel of scripts/wheels.py, or its folder

The sdist contains the files that git tracks. Like pip, the script builds the wheel from it in a fresh
environment that has torch, setuptools and ninja, so that a missing file would show. It then installs the
wheel in an environment with torch alone. In both it runs `info` and tests/_smoke.py in a folder outside of
the repository. torch comes from pip, as pinned in requirements/torch.txt. Compilation takes some minutes.

With --try it installs a wheel that is there into an empty environment with torch, without a compiler in PATH,
and times that. At last it uninstalls it, and checks that nothing is left.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
# Names that an extension has only if it was compiled with TORCH_UVM_TEST_BINDINGS=1.
TEST_DOUBLES = ("FailingCalls", "emu_fail_call")
# Variables to remove from the environment of a test: paths to the repository, and switches of its user.
NOT_PASSED_ON = ("TORCH_UVM", "PYTORCH_ENABLE_UNIFIED_MEMORY", "PYTHONPATH")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


def copy_tracked(to: Path) -> None:
    for path in tracked_files():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, to / path)


def make_sdist(tree: Path, python: Path | str = sys.executable) -> Path:
    """Builds the sdist of `tree` in its folder dist."""
    subprocess.run([python, "setup.py", "-q", "sdist"], cwd=tree, check=True)
    (made,) = (tree / "dist").glob("*.tar.gz")
    return made


def files_of(package: Path) -> set[str]:
    """The paths in an sdist, relative to its top folder, or in a wheel."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return set(wheel.namelist())
    with tarfile.open(package) as sdist:
        return {name.partition("/")[2] for name in (file.name for file in sdist if file.isfile())}


def test_doubles_in(wheel: Path) -> list[str]:
    """The test doubles that its extension contains."""
    with zipfile.ZipFile(wheel) as archive:
        (extension,) = (name for name in archive.namelist() if re.search(r"/_C\..*so$", name))
        content = archive.read(extension)
    return [name for name in TEST_DOUBLES if name.encode() in content]


def wheel_in(folder: Path) -> Path:
    """The newest wheel of scripts/wheels.py in a folder that is for the Python that runs this."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = [*folder.glob(f"torch_uvm-*-{python}-manylinux*.whl")]
    if not found:
        sys.exit(f"{folder} has no wheel for {python}; `make wheels` builds it")
    return max(found, key=lambda path: path.stat().st_mtime)


def files_below(folder: Path) -> set[Path]:
    """The files of an environment. Of compiled Python files, which an import may add: those of torch_uvm."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {path for path in files if "__pycache__" not in path.parts or "torch_uvm" in str(path)}


def unpack(sdist: Path, to: Path) -> Path:
    """Unpacks an sdist. Returns the folder of its files."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(to)
    (made,) = to.iterdir()
    return made


def make_environment(folder: Path) -> Path:
    """Creates an empty environment. Returns its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, folder: Path) -> str:
    """Runs Python in `folder`. Returns its output.

    Raises:
        subprocess.CalledProcessError: it failed; its stderr went to this process's stderr.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(NOT_PASSED_ON)}
    environment["TORCH_UVM_DEVICE"] = "emu"
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def try_out(python: Path, folder: Path) -> str:
    """Runs `info` and the smoke test with an installed torch_uvm; `folder` is outside the repository."""
    shutil.copy2(ROOT / "tests" / "_smoke.py", folder / "smoke.py")
    return run(python, "-m", "torch_uvm", "info", folder=folder) + run(python, "smoke.py", folder=folder)


@contextmanager
def timed(what: str) -> Iterator[None]:
    begin = time.perf_counter()
    print(f"{what} ...", flush=True)
    yield
    print(f"  {time.perf_counter() - begin:.1f} s", flush=True)


def size(path: Path) -> str:
    return f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(files_of(path))} files"


def build_and_try(output: Path, folder: Path) -> None:
    tree = folder / "tree"
    torch, build = (str(ROOT / "requirements" / f"{name}.txt") for name in ("torch", "build"))
    with timed("the source distribution"):
        copy_tracked(tree)
        sdist = make_sdist(tree)
        print(f"  {size(sdist)}")
    with timed("an empty environment, torch and build tools"):
        builder = make_environment(folder / "builder")
        subprocess.run([builder, *PIP, "install", "-r", torch, "-r", build], check=True)
    with timed("the wheel, from the source distribution"):
        environment = os.environ | {"PATH": f"{builder.parent}:{os.environ['PATH']}"}
        environment["TORCH_UVM_TEST_BINDINGS"] = "0"
        options = ["--no-build-isolation", "--no-deps", "-w", str(folder)]
        command = [str(builder), *PIP, "wheel", *options, str(sdist)]
        subprocess.run(command, env=environment, check=True)
        (wheel,) = folder.glob("*.whl")
        print(f"  {size(wheel)}")
        if found := test_doubles_in(wheel):
            sys.exit(f"{wheel.name} has test doubles: {', '.join(found)}")
    with timed("an empty environment, torch alone"):
        user = make_environment(folder / "user")
        subprocess.run([user, *PIP, "install", "-r", torch], check=True)
    outside = folder / "outside"
    outside.mkdir()
    for python in (builder, user):
        with timed(f"info and the smoke test, in {python.parents[1].name}"):
            # Installs dependencies too: torch must be present before.
            subprocess.run([python, *PIP, "install", str(wheel)], check=True)
            said = try_out(python, outside).splitlines()
            print(f"  {said[0]}\n  {said[-1]}")
    output.mkdir(parents=True, exist_ok=True)
    for made in (sdist, wheel):
        shutil.copy2(made, output)
        print(output / made.name)


def try_wheel(wheel: Path, torch: list[str], folder: Path) -> None:
    with timed(f"an empty environment, {' '.join(torch)}"):
        user = make_environment(folder / "user")
        subprocess.run([user, *PIP, "install", *torch], check=True)
    print(size(wheel))
    before = files_below(folder / "user")
    with timed("installing it, without a compiler in PATH"):
        alone = os.environ | {"PATH": str(user.parent)}
        subprocess.run([user, *PIP, "install", str(wheel)], env=alone, check=True)
    outside = folder / "outside"
    outside.mkdir()
    code = "import torch, torch_uvm; print(torch.__version__, torch_uvm._C.__file__.split('/')[-2])"
    print("  imported:", run(user, "-c", code, folder=outside).strip())
    said = try_out(user, outside).splitlines()
    print(f"  {said[0]}\n  {said[-1]}")
    subprocess.run([user, *PIP, "uninstall", "-y", "torch_uvm"], check=True)
    if left := files_below(folder / "user") - before:
        sys.exit(f"uninstalling it leaves {', '.join(sorted(map(str, left)))}")
    print("  uninstalled: nothing is left")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--try", dest="wheel", type=Path, metavar="WHEEL", help="try this wheel")
    parser.add_argument("arguments", nargs="*", help="the folder for what was built; with --try, which torch")
    given = parser.parse_args()
    pinned = ["-r", str(ROOT / "requirements" / "torch.txt")]
    with tempfile.TemporaryDirectory() as folder:
        if given.wheel is not None:
            wheel = wheel_in(given.wheel) if given.wheel.is_dir() else given.wheel
            try_wheel(wheel.resolve(), given.arguments or pinned, Path(folder))
        elif len(given.arguments) == 1:
            build_and_try(Path(given.arguments[0]).resolve(), Path(folder))
        else:
            parser.error("it takes one folder")


if __name__ == "__main__":
    main()
