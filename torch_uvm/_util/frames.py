"""Tracebacks without the frames of this package."""

from __future__ import annotations

import os
import types

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def without_our_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """`traceback` from the first frame of the program (or of runpy, for a module)."""
    kept = traceback
    step = traceback
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        ours = file.startswith(_OURS)
        if not ours and step.tb_frame.f_globals.get("__name__") != "runpy":
            break
        step = step.tb_next
        if ours:
            kept = step
    return kept
