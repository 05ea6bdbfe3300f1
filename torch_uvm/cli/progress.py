"""Progress on stderr, for work of more than two seconds."""

from __future__ import annotations

import sys
import threading
import time

_PATIENCE = 2.0  # seconds before the first message
_EVERY = 0.2  # on a terminal, which overwrites the line
_EVERY_ELSEWHERE = 10.0


class Progress:
    """A line such as `replaying on caching: 43 %`. Short work prints nothing."""

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

    def close(self) -> None:
        """Clears the line."""
        if self._shown:
            print(f"\r{'':<{self._shown}}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0


class Busy:
    """The same for work that cannot be counted: a scope that prints a line if it takes long."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._timer = threading.Timer(_PATIENCE, self._say)
        self._timer.daemon = True
        self._shown = False

    def _say(self) -> None:
        self._shown = True
        end = "" if sys.stderr.isatty() else "\n"
        print(f"{self._what} ...", end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._shown and sys.stderr.isatty():
            print(f"\r{'':<{len(self._what) + 4}}\r", end="", file=sys.stderr, flush=True)
