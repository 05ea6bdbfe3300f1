"""How `python -m torch_uvm` ends if the package cannot be imported: one line instead of a traceback."""

from __future__ import annotations

import sys


def end_as_command(error: object) -> None:
    """Ends the process with status 1 if it is `python -m torch_uvm`.

    Otherwise returns, for the caller to raise.
    """
    words = sys.orig_argv[1:]
    if any(words[at : at + 2] == ["-m", "torch_uvm"] for at in range(len(words))) and sys.argv[:1] == ["-m"]:
        sys.exit(f"torch_uvm: {error}")
