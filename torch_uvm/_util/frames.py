"""Frames of the program, between those of this package and of PyTorch."""

from __future__ import annotations

import os
import sys
import types

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
#: Files whose frames are skipped: a place is the innermost line outside them.
LOOKED_PAST = (_OURS, _TORCH, "<frozen ", "<eval_with_key>")


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


def place_of(traceback: types.TracebackType | None) -> str:
    """The innermost place in a traceback, as file:line; empty if there is none."""
    place = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(LOOKED_PAST):
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def place_here() -> str:
    """The place that runs now, as file:line; "" in a backward pass."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LOOKED_PAST):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
