"""What both recordings share: one at a time, completed at the end of a `with` block or at exit."""

from __future__ import annotations

import atexit
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


class Recording:
    """A file that is being written, from its construction until `stop()`.

    Raises:
        RuntimeError: another recording of this kind is active.
    """

    _lock: ClassVar[threading.Lock]
    _active: ClassVar[Recording | None]
    _function: ClassVar[str]  #: the public function that starts it, for messages

    def __init_subclass__(cls) -> None:
        cls._lock = threading.Lock()
        cls._active = None

    def __init__(self, path: Path) -> None:
        self.path = path
        kind = type(self)
        with kind._lock:
            if kind._active is not None:
                raise RuntimeError(
                    f"{kind._active!r} is active; one recording at a time: stop() that one first"
                )
            self._begin()
            kind._active = self
            atexit.register(self.stop)

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Completes the file. A second call does nothing."""
        kind = type(self)
        with kind._lock:
            if kind._active is not self:
                return
            kind._active = None
            atexit.unregister(self.stop)
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{self._function}({str(self.path)!r})"
