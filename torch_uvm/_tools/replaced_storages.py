"""Storages that a loop replaces, as in ``x = next(batches)``: the old one is freed after the new one is made.

Both have one role, so for a moment a value stands for two storages, which no schedule can express.
"""

from __future__ import annotations

from dataclasses import replace

from torch_uvm._tools.access_traces import Trace


def freed_before_replaced(trace: Trace) -> Trace:
    """The trace, with each replaced storage freed one operator earlier: before its successor is made.

    A storage is replaced if it is freed behind an operator that does not use it, where a storage of as many
    bytes is made, and if it was itself made behind an operator of this name.
    """
    operators = list(trace.operators)
    makers: dict[int, str] = {}
    for at, op in enumerate(operators):
        made = [trace.storages[name].bytes for name in op.births] if op.deaths else []
        earlier = []
        for name in op.deaths if at > 0 and made else ():
            size = trace.storages[name].bytes
            used = name in op.reads or name in op.writes or name in op.births
            if not used and size in made and makers.get(name) == op.name:
                made.remove(size)
                earlier.append(name)
        if earlier:
            before = operators[at - 1]
            operators[at - 1] = replace(before, deaths=[*before.deaths, *earlier])
            operators[at] = replace(op, deaths=[name for name in op.deaths if name not in earlier])
        makers.update(dict.fromkeys(op.births, op.name))
    return replace(trace, operators=operators)
