"""Paths of files that are going to be written."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch_uvm._util.arguments import show


def output_file(path: str | os.PathLike[str]) -> Path:
    """`path`, made absolute, because a script may change the working directory.

    Raises:
        TypeError: `path` is neither a string nor a path.
        IsADirectoryError: it is a folder.
        FileNotFoundError: the folder that it would be in does not exist.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path is {show(path)}; accepted: a string or a path")
    file = Path(path).absolute()
    if file.is_dir():
        raise IsADirectoryError(f"path={str(path)!r} is a folder; give the name of a file to write")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: there is no folder {str(file.parent)!r}; make it first")
    return file


def output_argument(text: str) -> Path:
    """The same of a command line: what is wrong becomes a usage error."""
    try:
        return output_file(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rank_here() -> int | None:
    """The rank of this process under torchrun; None: it has none."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isascii() and rank.isdigit() else None


def of_rank(path: Path) -> Path:
    """The path of this process's file for a command with ``path``: a rank of torchrun has its own file."""
    rank = rank_here()
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
