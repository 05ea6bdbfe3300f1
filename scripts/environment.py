"""Creates the virtual environment of the Makefile. Uses the standard library alone: nothing is installed
yet.

    python scripts/environment.py create .venv [--keep]     creates it, unless it exists and is up to date
    .venv/bin/python scripts/environment.py install         installs what is pinned in requirements/

The interpreter that runs ``create`` is the base of the environment. If it has torch 2.11 or later, the
environment borrows that torch; otherwise the pinned one is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)  # of the pinned packages; torch_uvm itself runs on 3.10
OLDEST_TORCH = (2, 11)
BESIDE_TORCH = ["build", "demo", "examples", "test", "docs", "lint"]  # requirements/*.txt


def torch_version() -> str | None:
    """The version of the torch that this interpreter would import. Does not import it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def borrowed_from(environment: Path) -> str | None:
    """The torch that the environment borrows, as recorded by `create`."""
    for line in (environment / "stamps" / "origin").read_text().splitlines():
        if line.startswith("torch "):
            return line
    return None


def describe_origin() -> str:
    lines = [f"python {sys.executable} {sys.version.split()[0]}"]
    version = torch_version()
    if version is not None:
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if found < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            sys.exit(f"{sys.executable} has torch {version}; torch_uvm needs {oldest} or newer")
        lines.append(f"torch {version}")
    return "\n".join(lines) + "\n"


def create(environment: Path, keep: bool) -> None:
    """Recreates the environment if it was made from another interpreter or beside another torch.
    The file stamps/origin changes only then."""
    origin = environment / "stamps" / "origin"
    if keep and origin.exists():
        return
    if Path(sys.prefix).resolve() == environment.resolve():
        sys.exit(f"{sys.executable} belongs to {environment}, which cannot be made from itself")
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(
            f"{sys.executable} is Python {sys.version.split()[0]}; the pinned packages need {oldest} or newer"
        )
    described = describe_origin()
    if origin.exists() and origin.read_text() == described:
        return
    borrow = torch_version() is not None
    in_environment = sys.prefix != sys.base_prefix
    # --system-site-packages exposes the base interpreter and not an environment, so an environment that lends
    # its torch is named in a .pth file instead.
    venv.create(
        environment,
        clear=True,
        with_pip=True,
        symlinks=True,
        system_site_packages=borrow and not in_environment,
    )
    if borrow and in_environment:
        lenders = [path for path in sys.path if Path(path).is_dir() and "site-packages" in path]
        (site_packages(environment) / "borrowed.pth").write_text("".join(f"{path}\n" for path in lenders))
    origin.parent.mkdir()
    origin.write_text(described)


def site_packages(environment: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


def pinned(name: str) -> list[tuple[str, str]]:
    """(requirement, size of its download) for each line of requirements/NAME.txt."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return [(what, size) for what, size in re.findall(r"^(\S+==\S+)\s+#\s*(.+)$", text, re.MULTILINE)]


def install() -> None:
    borrowed = borrowed_from(Path(sys.prefix))
    names = BESIDE_TORCH if borrowed else ["torch", *BESIDE_TORCH]
    print(f"{borrowed} is there already." if borrowed else "No torch is there yet.")
    print("pip now downloads, from where it is configured to, what of this it has not in its cache:")
    for name in names:
        for requirement, size in pinned(name):
            print(f"  {requirement:24} {size}")
    sys.stdout.flush()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    if not sys.dont_write_bytecode:
        # Few of the dependencies' modules are imported; those are compiled then.
        command.append("--no-compile")
    for name in names:
        command += ["-r", str(ROOT / "requirements" / f"{name}.txt")]
    sys.exit(subprocess.run(command, check=False).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    creating = commands.add_parser("create")
    creating.add_argument("environment", type=Path)
    creating.add_argument(
        "--keep", action="store_true", help="keep an existing environment even if it is out of date"
    )
    commands.add_parser("install")
    arguments = parser.parse_args()
    if arguments.command == "create":
        create(arguments.environment, arguments.keep)
    else:
        install()


if __name__ == "__main__":
    main()
