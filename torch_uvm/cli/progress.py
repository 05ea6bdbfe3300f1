"""Progress on stderr, for work of more than two seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_PATIENCE = 2.0  # seconds before the first message
_EVERY = 0.2  # on a terminal, which overwrites the line
_EVERY_ELSEWHERE = 10.0


class Progress:
    """A scope whose calls print a line such as `dry run: 43 %`. Short work prints nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + _PATIENCE
        self._shown = 0

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_EVERY if self._terminal else _EVERY_ELSEWHERE)
        line = f"{self._what}: {100 * done // max(of, 1)} %"
        if self._terminal:
            print(f"\r{line:<{self._shown}}", end="", file=sys.stderr, flush=True)
            self._shown = max(self._shown, len(line))
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Clears the line."""
        if self._shown:
            print(f"\r{'':<{self._shown}}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0
