"""Frames of the program, between those of this package and of PyTorch."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from traceback import walk_stack, walk_tb

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
    return _innermost(reversed([*walk_tb(traceback)]))


def place_here() -> str:
    """The place that runs now, as file:line; "" in a backward pass."""
    return _innermost(walk_stack(sys._getframe()))


def _innermost(frames: Iterable[tuple[types.FrameType, int]]) -> str:
    places = ((frame.f_code.co_filename, line) for frame, line in frames)
    return next((f"{file}:{line}" for file, line in places if not file.startswith(LOOKED_PAST)), "")
