"""Threads of a test that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(*works: Callable[[], object]) -> None:
    """Runs each of them on a thread of its own, and raises what one of them has raised."""
    raised: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
