"""Reads files of lines that may come from an untrusted source: sizes have bounds, errors name the line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch_uvm._util.escaping import printable


def read_lines(
    path: str | Path,
    parse: Callable[[bytes, int], object],
    longest: int,
    progress: Callable[[int, int], object] | None,
) -> None:
    """Gives each line to ``parse``, with its number from 1. The ValueErrors of ``parse`` get file and line.

    Args:
        longest: bytes of a line.
        progress: called from time to time with the bytes read and the size of the file.

    Raises:
        ValueError: a line is too long or cut off, or does not parse, or there is none.
        OSError: it cannot be read.
    """
    number = done = 0
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        try:
            while line := file.readline(longest):
                number += 1
                done += len(line)
                if not line.endswith(b"\n"):
                    cut_off = "the last line is cut off; was the recording stopped?"
                    raise ValueError(f"longer than {longest} bytes" if len(line) == longest else cut_off)
                parse(line, number)
                if progress is not None and number % 4096 == 0:
                    progress(done, size)
        except RecursionError:
            raise ValueError(f"{printable(path)}, line {number}: nested too deep") from None
        except ValueError as error:
            raise ValueError(f"{printable(path)}, line {number}: {error}") from None
    if number == 0:
        raise ValueError(f"{printable(path)}: empty; there is at least a header")
